"""Operators on vectors: `map`, `reduce`, `filter`, ... become statements of the IR.

Whole-vector operators of `operators.py` are checked against their table (`apply`); `concat` defines the layout of the
compressed bytes, which `extract` in `evaluate.py` is checked against.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.compll.frontend import scalar_ops, syntax
from penstock.compll.frontend.scope import Compressed, Scope, Value, VectorRef, length_of, size_of
from penstock.compll.ir import GRADIENT, LATEST, Apply, Expr, Field, Filter, GroupReduce, Length, Reduce, is_static
from penstock.compll.operators import Operator
from penstock.compll.types import BOOL, INT32, MAX_NUMEL, SCALARS, Vector

if TYPE_CHECKING:
    from penstock.compll.frontend.evaluate import Evaluator


def _operands(
    ev: "Evaluator", node: syntax.Call, scope: Scope, extra: int = 0
) -> tuple[list[VectorRef], syntax.Name, list[syntax.Expression]]:
    """Return the vectors of `map(v, ..., f)`, the name f, and up to `extra` arguments after it."""
    arguments = list(node.arguments)
    split = next((i for i, item in enumerate(arguments) if _is_function(ev, item, scope)), None)
    if split is None or split == 0 or len(arguments) - split - 1 > extra:
        more = ", n" if extra else ""
        problem = f"{node.function} takes vectors and then the name of a function"
        for item in arguments[1:]:
            if isinstance(item, syntax.Name) and scope.find(item.name) is None and ev.globals.find(item.name) is None:
                ev.arity(item.name, item)  # raises for an unknown name
        raise ev.error(node, problem, f"write {node.function}(vector, function{more})")
    function = arguments[split]
    assert isinstance(function, syntax.Name)
    operands = [ev.vector(item, scope) for item in arguments[:split]]
    same_length(ev, arguments[:split], operands)
    return operands, function, arguments[split + 1 :]


def _is_function(ev: "Evaluator", node: syntax.Expression, scope: Scope) -> bool:
    if not isinstance(node, syntax.Name) or scope.find(node.name) or ev.globals.find(node.name):
        return False
    return node.name in ev.unit.functions or node.name in ev.unit.builtins or node.name in ("sum", "size")


def lower_map(ev: "Evaluator", node: syntax.Call, scope: Scope, hint: str) -> Value:
    """`map(v, ..., f)`: element i is f(v[i], ...)."""
    operands, function, _ = _operands(ev, node, scope)
    expr = ev.call_over(operands[0].length, function, operands)
    return ev.writer.map(hint or function.name, operands[0].length, expr)


def lower_filter(ev: "Evaluator", node: syntax.Call, scope: Scope, hint: str) -> Value:
    """`filter(v, ..., f)`: the elements of v where f(v[i], ...) is not 0, in order."""
    operands, function, _ = _operands(ev, node, scope)
    keep = ev.call_over(operands[0].length, function, operands)
    first = operands[0]
    name = ev.writer.fresh(hint or "filter")
    ev.writer.statements.append(Filter(name, first.length, scalar_ops.truth(keep), first.at_i()))
    return VectorRef(name, first.element, Length(name), first.low, first.high)


def lower_reduce(ev: "Evaluator", node: syntax.Call, scope: Scope, hint: str) -> Value:
    """`reduce(v, r)`: one value; `reduce(v, r, n)`: one for each n neighbours, where n is 0 one for all."""
    operands, function, rest = _operands(ev, node, scope, extra=1)
    if len(operands) != 1:
        raise ev.error(node, "reduce takes one vector", "map several into one first")
    expr, length = scalar_ops.widen(operands[0].at_i()), operands[0].length
    block = ev.block(rest[0], scope) if rest else 0
    if function.name == "size" and "size" not in ev.unit.functions:
        return _sizes(ev, hint, length, block)
    builtin = ev.unit.builtins.get(function.name)
    reducer = function.name if function.name == "sum" or (builtin and builtin.reduces) else "fold"
    if block:
        return _group_reduce(ev, node, hint, operands[0], reducer, block)
    combine = _fold(ev, function, expr) if reducer == "fold" else None
    name = ev.writer.fresh(hint or reducer)
    ev.writer.statements.append(Reduce(name, reducer, length, expr, combine))
    low, high = _reduced_range(reducer, operands[0])
    return Expr("name", expr.type, value=name, low=low, high=high)


def _fold(ev: "Evaluator", function: syntax.Name, expr: Expr) -> Expr:
    pair = [Expr("operand", expr.type, value=side, low=expr.type.low, high=expr.type.high) for side in (0, 1)]
    combine = ev.call(function, function.name, pair)
    ev.refuse_by_block(function, combine)
    if combine.type != expr.type:
        problem = f"{function.name} returns {combine.type.name} and takes {expr.type.name}"
        raise ev.error(function, problem, "a reducer takes two elements and returns one of the same type")
    return combine


def _sizes(ev: "Evaluator", hint: str, length: Length, block: int) -> Value:
    """Return how many elements there are: in all, or in each block, of which the last may be short."""
    whole = size_of(length)
    if not block:
        return whole
    index = Expr("index", INT32, low=0, high=MAX_NUMEL // block)
    left = scalar_ops.binary("-", whole, scalar_ops.binary("*", index, scalar_ops.integer(block)))
    size = scalar_ops.select(scalar_ops.compare("lt", left, scalar_ops.integer(block)), left, scalar_ops.integer(block))
    made = ev.writer.map(hint or "size", Length(length.of, length.group * block), replace(size, low=1, high=block))
    return replace(made, by_block=True)


def _group_reduce(ev: "Evaluator", node: syntax.Call, hint: str, vector: VectorRef, reducer: str, block: int) -> Value:
    if reducer == "fold":
        raise ev.error(node, "groups are reduced by smaller, greater or sum", "use one of those")
    name, expr = ev.writer.fresh(hint or reducer), scalar_ops.widen(vector.at_i())
    made = GroupReduce(name, reducer, vector.length, block, expr)
    ev.writer.statements.append(made)
    low, high = _reduced_range(reducer, vector, block)
    return VectorRef(name, expr.type, made.length, low, high, by_block=True)


def _reduced_range(reducer: str, vector: VectorRef, count: int = MAX_NUMEL) -> tuple[int, int]:
    low, high = vector.low, vector.high
    if reducer == "sum":
        low, high = min(0, low * count), max(0, high * count)
    inside = INT32.low <= low and high <= INT32.high
    if reducer == "fold" or not inside:
        return INT32.low, INT32.high
    return min(0, low), max(0, high)  # an empty vector reduces to 0


def lower_sort(ev: "Evaluator", node: syntax.Call, scope: Scope, hint: str) -> Value:
    """`sort(v, smaller)` ascending, `sort(v, greater)` descending, `sort(v, f)` ascending by f(v[i])."""
    operands, function, _ = _operands(ev, node, scope)
    vector, descending = operands[0], int(function.name == "greater")
    if function.name in ("smaller", "greater"):
        return write_apply(ev, "sort", hint, (vector,), (scalar_ops.integer(descending),), vector)
    keys = ev.writer.map("keys", vector.length, ev.call_over(vector.length, function, [vector]))
    return write_apply(ev, "sort_by", hint, (keys, vector), (scalar_ops.integer(0),), vector)


def lower_scan(ev: "Evaluator", node: syntax.Call, scope: Scope, hint: str) -> Value:
    """`scan(v, sum)`: element i is v[0] + ... + v[i]; `scan(v, greater)`: the greatest so far. Integers only."""
    operands, function, _ = _operands(ev, node, scope)
    vector = operands[0]
    if vector.element.is_float or function.name not in ("sum", "greater"):
        raise ev.error(
            node, "scan sums integers or finds their greatest so far", "use scan(v, sum) or scan(v, greater)"
        )
    wide = vector
    if vector.element is not INT32:
        wide = ev.writer.map("wide", vector.length, scalar_ops.widen(vector.at_i()))
    low, high = _reduced_range(function.name, wide)
    operator = "running" if function.name == "greater" else "scan"
    return write_apply(ev, operator, hint, (wide,), (), VectorRef("", INT32, wide.length, low, high))


def lower_range(ev: "Evaluator", node: syntax.Call, scope: Scope, hint: str) -> Value:
    """`range(v.size)`: 0, 1, 2, ... up to a vector's size."""
    if len(node.arguments) != 1:
        raise ev.error(node, f"range takes 1 argument and is given {len(node.arguments)}", "write range(v.size)")
    length = length_of(ev.scalar(node.arguments[0], scope))
    if length is None:
        raise ev.error(
            node.arguments[0], "range needs a vector's size", "write range(v.size) or range((v.size + 4) / 5)"
        )
    index = Expr("index", INT32, low=0, high=MAX_NUMEL - 1)
    return ev.writer.map(hint or "range", length, index)


def lower_random(ev: "Evaluator", node: syntax.Call, scope: Scope, hint: str) -> Value:
    """`random<float>(a, b)`: uniform in [a, b), another for each element."""
    if len(node.arguments) != 2:
        raise ev.error(
            node, f"random takes 2 arguments and is given {len(node.arguments)}", "write random<float>(0, 1)"
        )
    low, high = scalar_ops.common(*(ev.scalar(argument, scope) for argument in node.arguments))
    if node.template == "float":
        low, high = scalar_ops.to_float(low), scalar_ops.to_float(high)
    elif node.template and low.type.is_float:
        raise ev.error(node, "the bounds are floats", "write random<float>(...)")
    stream = ev.writer.stream()
    last = max(low.low, high.high - 1)
    return Expr("random", low.type, (low, high), stream, low.low, last)


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
        brought = tuple(scalar_ops.convert(scalar, operator.scalar) for scalar in scalars)
    except scalar_ops.OperandError as error:
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
    most = scalar_ops.integer(1) if operator.length == "one" else scalars[-1] if is_counted else None
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


def concat(ev: "Evaluator", node: syntax.Call, scope: Scope, hint: str) -> Value:
    """`concat(a, ...)`: the compressed bytes: scalars and vectors one after another."""
    if ev.layout is not None:
        raise ev.error(node, "concat writes compressed bytes, which only encode does", "move it to encode")
    if ev.packed is not None:
        raise ev.error(node, "encode calls concat twice", "write all fields in one concat")
    fields: list[Field] = []
    sources: list[Expr | str] = []
    for argument in node.arguments:
        value = ev.value(argument, scope)
        name = _field_name(argument, value)
        if isinstance(value, VectorRef) and value.name in (GRADIENT, LATEST):  # sent as it is: a vector of its own
            value = ev.writer.map("values", value.length, value.at_i())
        if isinstance(value, VectorRef):
            _count_first(fields, sources, value.length)
            fields.append(Field(name, Vector(value.element), value.length))
            sources.append(value.name)
        elif isinstance(value, Expr):
            ev.refuse_by_block(argument, value)
            value = scalar_ops.convert(value, SCALARS["uint1"]) if value.type is BOOL else value
            fields.append(Field(name, value.type))
            sources.append(value)
        else:
            raise ev.error(argument, "concat takes scalars and vectors", "hand over their members")
    ev.packed = tuple(fields), tuple(sources)
    return Compressed()


def _count_first(fields: list[Field], sources: list[Expr | str], length: Length) -> None:
    if length.of == GRADIENT or any(field.counts == length.of for field in fields):
        return
    fields.append(Field(f"{length.of}.size", INT32, counts=length.of))
    sources.append(Expr("size", INT32, value=length.of, low=0, high=MAX_NUMEL))


def _field_name(node: syntax.Expression, value: Value) -> str:
    match node:
        case syntax.Name():
            return node.name
        case syntax.Member():
            return node.member
        case syntax.At():
            return "values"
    if isinstance(value, VectorRef):
        return value.name
    return str(value.value) if isinstance(value, Expr) and value.op == "name" else "value"


OPERATIONS: dict[str, Callable[["Evaluator", syntax.Call, Scope, str], Value]] = {
    "map": lower_map,
    "filter": lower_filter,
    "reduce": lower_reduce,
    "sort": lower_sort,
    "scan": lower_scan,
    "range": lower_range,
    "random": lower_random,
    "concat": concat,
}
