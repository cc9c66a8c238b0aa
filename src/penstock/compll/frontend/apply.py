"""Whole-vector operators of `operators.py` put to use: arguments held against the table, sizes, ranges."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.compll.frontend import arithmetic, syntax
from penstock.compll.frontend.scope import Scope, Value, VectorRef, length_of
from penstock.compll.ir import Apply, Expr, Length, is_static
from penstock.compll.operators import Operator
from penstock.compll.types import INT32, MAX_NUMEL

if TYPE_CHECKING:
    from penstock.compll.frontend.evaluate import Evaluator


def apply(ev: "Evaluator", node: syntax.Call, scope: Scope, hint: str, operator: Operator) -> Value:
    """Write a whole-vector operator of the table."""
    wanted = operator.vectors + operator.scalars
    if len(node.arguments) != wanted:
        text = f"{operator.name} takes {wanted} argument{'s' * (wanted != 1)} and is given {len(node.arguments)}"
        raise ev.error(node, text, f"hand over {operator.vectors} vectors, then {operator.scalars} scalars")
    nodes = node.arguments[: operator.vectors]
    operands = [ev.vector(item, scope) for item in nodes]
    same_length(ev, nodes, operands)
    if operator.takes and operands[0].element != operator.takes:
        problem = f"{operator.name} takes {operator.takes.name}* and is given {operands[0].type.name}"
        raise ev.error(nodes[0], problem, f"map a function over it that returns {operator.takes.name}")
    scalars = [ev.scalar(item, scope) for item in node.arguments[operator.vectors :]]
    for item, scalar in zip(node.arguments[operator.vectors :], scalars, strict=True):
        ev.refuse_by_block(item, scalar)
    try:
        brought = tuple(arithmetic.convert(scalar, operator.scalar) for scalar in scalars)
    except arithmetic.OperandError as error:
        raise ev.error(node, *error.args) from None
    return _apply(ev, node, hint, operator, operands, brought)


def _apply(
    ev: "Evaluator",
    node: syntax.Call,
    hint: str,
    operator: Operator,
    operands: Sequence[VectorRef],
    scalars: tuple[Expr, ...],
) -> Value:
    last = operands[-1]
    element = operator.result or last.element
    low, high = (element.low, element.high) if operator.result else (last.low, last.high)
    if operator.result is INT32 and operator.length == "upto":
        low, high = 0, MAX_NUMEL - 1  # indices
    if operator.length == "scalar":
        length = length_of(scalars[-1])
        if length is None:
            raise ev.error(node.arguments[-1], f"{operator.name} needs a vector's size", "write gradient.size")
        shape = VectorRef("", element, length, min(0, low), max(0, high))
        return write_apply(ev, operator.name, hint, operands, scalars, shape)
    stream = ev.writer.stream() if operator.draws else 0
    is_counted = operator.length in ("upto", "one")
    shape = VectorRef("", element, Length() if is_counted else operands[0].length, low, high)
    most = arithmetic.integer(1) if operator.length == "one" else scalars[-1] if is_counted else None
    bound = most if most is not None and is_static(most) else None
    return write_apply(ev, operator.name, hint, operands, scalars, shape, stream, bound, is_counted)


def write_apply(
    ev: "Evaluator",
    operator: str,
    hint: str,
    operands: Sequence[VectorRef],
    scalars: tuple[Expr, ...],
    shape: VectorRef,
    stream: int = 0,
    bound: Expr | None = None,
    is_counted: bool = False,
) -> VectorRef:
    """Write the statement and return its vector, `shape` but for its name; `is_counted`: its size is its own."""
    name = ev.writer.fresh(hint or operator)
    length = Length(name) if is_counted else shape.length
    names = tuple(operand.name for operand in operands)
    ev.writer.statements.append(Apply(name, operator, shape.element, length, names, scalars, bound, stream))
    return VectorRef(name, shape.element, length, shape.low, shape.high)


def same_length(ev: "Evaluator", nodes: Sequence[syntax.Expression], operands: Sequence[VectorRef]) -> None:
    """Refuse vectors that may differ in size."""
    for node, operand in zip(nodes, operands, strict=True):
        if operand.length != operands[0].length:
            lengths = f"{operands[0].length} and {operand.length}"
            raise ev.error(
                node, f"the vectors have different sizes: {lengths}", "use vectors made from one another by map"
            )
