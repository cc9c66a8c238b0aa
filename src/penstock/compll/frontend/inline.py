"""Functions of a program put in where they are called: their statements run on expressions, `if` becomes `select`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.compll.frontend import arithmetic, syntax
from penstock.compll.frontend.scope import Scope, Slot
from penstock.compll.ir import Expr
from penstock.compll.types import Scalar

if TYPE_CHECKING:
    from penstock.compll.frontend.evaluate import Evaluator


def inline(e: "Evaluator", node: syntax.Node, function: syntax.Function, arguments: Sequence[Expr]) -> Expr:
    """Return the body of one of the program's functions with its arguments put in."""
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
        return Slot(target, arithmetic.convert(argument, target))
    except arithmetic.OperandError as error:
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
        return arithmetic.truth(e.scalar(statement.condition, scope))
    except arithmetic.OperandError as error:
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
        slot.value = arithmetic.named(value, statement.name)


def stored(e: "Evaluator", node: syntax.Expression, value: Expr, target: Scalar) -> Expr:
    """Return a value as the type it is stored in."""
    try:
        return arithmetic.convert(value, target)
    except arithmetic.OperandError as error:
        raise e.error(node, *error.args) from None


def choose(condition: Expr, yes: Expr, no: Expr) -> Expr:
    """Return one of two values, without a question where they are the same."""
    return yes if yes is no else arithmetic.select(condition, yes, no)


def retype(expr: Expr, target: Scalar) -> Expr:
    """Return a chosen value as the type both branches had before they were widened."""
    return expr if expr.type == target else arithmetic.convert(expr, target)


def _returns(statements: Sequence[syntax.Statement]) -> bool:
    return any(
        isinstance(statement, syntax.Return)
        or (isinstance(statement, syntax.Branch) and (_returns(statement.yes) or _returns(statement.no)))
        for statement in statements
    )
