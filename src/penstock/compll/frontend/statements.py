"""Bodies: the statements of encode and decode, and the program's functions, inlined where they are called.

There is no control flow in the IR: an `if` becomes a `select` between the values of its branches.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.compll.frontend import scalar_ops, syntax
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
    made = ev.writer.map(name, length, stored(ev, node, scalar_ops.named(expr, name), wanted.element))
    return replace(made, by_block=True)


def _let(ev: "Evaluator", name: str, expr: Expr) -> Expr:
    if expr.op in ("name", "field") or is_static(expr):
        return scalar_ops.named(expr, name)
    ev.writer.statements.append(Let(ev.writer.fresh(name), expr))
    made = ev.writer.statements[-1]
    return Expr("name", expr.type, value=made.name, low=expr.low, high=expr.high)


def inline(e: "Evaluator", node: syntax.Node, function: syntax.Function, arguments: Sequence[Expr]) -> Expr:
    """Return the value of a call to one of the program's functions, its body inlined."""
    if function.name in e.inlining:
        raise e.error(node, f"{function.name} calls itself", "there is no recursion; write it with operators")
    if function.result is None:
        raise e.error(node, f"{function.name} returns nothing", "give it a type and a return")
    scope = Scope()
    for declared, argument in zip(function.arguments, arguments, strict=True):
        scope.slots[declared.name] = _bind(e, node, declared, argument)
    result = e.type(function.result)
    if not isinstance(result, Scalar):
        raise e.error(function.result, "a function returns one element, not a vector", "drop the *")
    e.inlining.append(function.name)
    value = _run(e, function.body, scope, result)
    e.inlining.pop()
    if value is None:
        raise e.unit.source.error(
            function.end, f"{function.name} can end without a return", "return a value on every path"
        )
    return value


def _bind(e: "Evaluator", node: syntax.Node, declared: syntax.Argument, argument: Expr) -> Slot:
    if isinstance(declared.type, str):
        raise e.error(declared, "a function of elements takes no params", "write Block.parameter inside it")
    target = e.type(declared.type)
    if not isinstance(target, Scalar):
        raise e.error(declared, "a function of elements takes no vectors", "make the vector a global")
    try:
        return Slot(target, scalar_ops.convert(argument, target))
    except scalar_ops.OperandError as error:
        problem, advice = error.args
        raise e.error(node, f"argument {declared.name!r}: {problem}", advice) from None


def _run(e: "Evaluator", statements: Sequence[syntax.Statement], scope: Scope, result: Scalar) -> Expr | None:
    """Return what a function's statements return; None where they run past the end."""
    for number, statement in enumerate(statements):
        match statement:
            case syntax.Return():
                return stored(e, statement.value, e.scalar(statement.value, scope), result)
            case syntax.Declare() | syntax.Assign():
                _assign_local(e, statement, scope)
            case syntax.Branch():
                condition = condition_of(e, statement, scope)
                rest = statements[number + 1 :]
                if _returns(statement.yes) or _returns(statement.no):
                    yes = _run(e, (*statement.yes, *rest), scope.copy(), result)
                    no = _run(e, (*statement.no, *rest), scope.copy(), result)
                    return None if yes is None or no is None else retype(choose(condition, yes, no), result)
                _merge(e, condition, statement, scope, result)
    return None


def condition_of(e: "Evaluator", statement: syntax.Branch, scope: Scope) -> Expr:
    """Return the condition of an `if`."""
    try:
        return scalar_ops.truth(e.scalar(statement.condition, scope))
    except scalar_ops.OperandError as error:
        raise e.error(statement.condition, *error.args) from None


def _merge(e: "Evaluator", condition: Expr, statement: syntax.Branch, scope: Scope, result: Scalar) -> None:
    yes, no = scope.copy(), scope.copy()
    _run(e, statement.yes, yes, result)
    _run(e, statement.no, no, result)
    for name, slot in scope.slots.items():
        a, b = yes.slots[name].value, no.slots[name].value
        if a is not b and isinstance(a, Expr) and isinstance(b, Expr):
            slot.value = retype(choose(condition, a, b), a.type)


def _assign_local(e: "Evaluator", statement: syntax.Declare | syntax.Assign, scope: Scope) -> None:
    if isinstance(statement, syntax.Declare):
        declared = e.type(statement.type)
        if not isinstance(declared, Scalar):
            raise e.error(statement, "a function of elements holds no vectors", "declare a scalar")
        scope.slots[statement.name] = Slot(declared, None)
    slot = scope.slots.get(statement.name)
    if slot is None and e.globals.find(statement.name):
        raise e.error(statement, f"{statement.name!r} is a global", "assign globals in encode or decode only")
    if slot is None:
        raise e.unknown(statement, statement.name, scope.names(), "name")
    if statement.value is not None:
        assert isinstance(slot.type, Scalar)
        value = stored(e, statement.value, e.scalar(statement.value, scope), slot.type)
        slot.value = scalar_ops.named(value, statement.name)


def stored(e: "Evaluator", node: syntax.Expression, value: Expr, target: Scalar) -> Expr:
    """Return a value as the type it is stored in."""
    try:
        return scalar_ops.convert(value, target)
    except scalar_ops.OperandError as error:
        raise e.error(node, *error.args) from None


def choose(condition: Expr, yes: Expr, no: Expr) -> Expr:
    """Return `select(condition, yes, no)`, or the value itself where both are the same."""
    return yes if yes is no else scalar_ops.select(condition, yes, no)


def retype(expr: Expr, target: Scalar) -> Expr:
    """Return a chosen value as the type both branches had before they were widened."""
    return expr if expr.type == target else scalar_ops.convert(expr, target)


def _returns(statements: Sequence[syntax.Statement]) -> bool:
    return any(
        isinstance(statement, syntax.Return)
        or (isinstance(statement, syntax.Branch) and (_returns(statement.yes) or _returns(statement.no)))
        for statement in statements
    )
