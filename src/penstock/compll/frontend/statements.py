"""The bodies of encode and decode: variables are given values, and `if` chooses between those of its branches."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.compll.frontend import arithmetic, syntax
from penstock.compll.frontend.inline import choose, condition_of, retype, stored
from penstock.compll.frontend.scope import Compressed, Scope, Slot, Value, VectorRef, blocks_read
from penstock.compll.ir import GRADIENT, Expr, Length, Let, is_static
from penstock.compll.types import ByBlock, Scalar, Vector

if TYPE_CHECKING:
    from penstock.compll.frontend.evaluate import Evaluator


def elaborate(ev: "Evaluator", statements: Sequence[syntax.Statement], scope: Scope) -> None:
    """Elaborate the statements of encode or decode."""
    for statement in statements:
        match statement:
            case syntax.Return():
                raise ev.error(statement, "encode and decode return nothing", "assign their result")
            case syntax.Branch():
                _branch(ev, statement, scope)
            case syntax.Declare() | syntax.Assign():
                _assign(ev, statement, scope)


def _branch(ev: "Evaluator", statement: syntax.Branch, scope: Scope) -> None:
    condition = condition_of(ev, statement, scope)
    outer = ev.globals
    before, packed = len(ev.writer.statements), ev.packed
    branches = []
    for body in (statement.yes, statement.no):
        ev.globals, inner = outer.copy(), scope.copy()
        elaborate(ev, body, inner)
        branches.append(ev.globals.slots | inner.slots)
    ev.globals = outer
    if packed is not ev.packed or any(not isinstance(made, Let) for made in ev.writer.statements[before:]):
        raise ev.error(statement, "operators on vectors run always", "move them out of the if, or use ?:")
    for name, slot in (outer.slots | scope.slots).items():
        a, b = branches[0][name].value, branches[1][name].value
        if a is not b and isinstance(a, Expr) and isinstance(b, Expr):
            slot.value = _let(ev, name, retype(choose(condition, a, b), a.type))
        elif a is not b:
            raise ev.error(statement, f"{name!r} is assigned in one branch only", "give it a value before the if")


def _assign(ev: "Evaluator", statement: syntax.Declare | syntax.Assign, scope: Scope) -> None:
    if isinstance(statement, syntax.Declare):
        scope.slots[statement.name] = Slot(ev.type(statement.type), None)
    slot = scope.find(statement.name) or ev.globals.find(statement.name)
    if slot is None:
        raise ev.unknown(statement, statement.name, [*scope.names(), *ev.globals.names()], "name")
    if statement.value is None:
        return
    value = ev.value(statement.value, scope, slot.type, statement.name)
    slot.value = _fitting(ev, statement, statement.value, slot, value)


def _fitting(
    ev: "Evaluator", statement: syntax.Declare | syntax.Assign, node: syntax.Expression, slot: Slot, value: Value
) -> Value:
    if isinstance(slot.type, Scalar) and isinstance(value, Expr):
        ev.refuse_by_block(node, value)
        return _let(ev, statement.name, stored(ev, node, value, slot.type))
    if isinstance(slot.type, ByBlock):
        return _by_block(ev, statement.name, node, slot.type, value)
    if isinstance(slot.type, Vector) and isinstance(value, VectorRef):
        if slot.type.element == value.element:
            return replace(value, by_block=False)
        problem = f"{statement.name!r} is {slot.type.name} and the value is {value.type.name}"
        raise ev.error(node, problem, f"declare it {value.type.name}, or map a function that returns the other")
    if isinstance(slot.value, Compressed) and isinstance(value, Compressed):
        return value
    wanted = slot.type.name if slot.type else "what concat returns"
    found = value.type.name if isinstance(value, Expr | VectorRef) else "not a value"
    raise ev.error(node, f"{statement.name!r} is {wanted} and the value is {found}", "assign a value of its type")


def _by_block(ev: "Evaluator", name: str, node: syntax.Expression, wanted: ByBlock, value: Value) -> VectorRef:
    """Return a vector with one value for each block: as it is, or computed from others of as many."""
    length = Length(GRADIENT, wanted.block)
    if isinstance(value, VectorRef) and value.length == length and value.element == wanted.element:
        return replace(value, by_block=True)
    if isinstance(value, VectorRef) and (value.length != length or not value.by_block):
        problem = f"{name!r} is {wanted.name} and the value is {value.type.name}, one for {value.length}"
        raise ev.error(node, problem, f"reduce by blocks of {wanted.block}")
    if not isinstance(value, Expr | VectorRef):
        raise ev.error(node, f"{name!r} is {wanted.name} and the value is not a value", "assign a value of its type")
    expr = value if isinstance(value, Expr) else value.at_i()
    others = [each for each in map(ev.writer.length, blocks_read(expr)) if each != length]
    if others:
        problem = f"{name!r} has one value for {length}, and a part of this one for {others[0]}"
        raise ev.error(node, problem, "use blocks of one size")
    made = ev.writer.map(name, length, stored(ev, node, arithmetic.named(expr, name), wanted.element))
    return replace(made, by_block=True)


def _let(ev: "Evaluator", name: str, expr: Expr) -> Expr:
    if expr.op in ("name", "field") or is_static(expr):
        return arithmetic.named(expr, name)
    ev.writer.statements.append(Let(ev.writer.fresh(name), expr))
    made = ev.writer.statements[-1]
    return Expr("name", expr.type, value=made.name, low=expr.low, high=expr.high)
