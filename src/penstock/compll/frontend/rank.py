"""A sorted vector of which one element is read needs no sort: an order statistic finds it in linear time.

`sort(v, greater)[k]` is how a program asks for a threshold. Where nothing else reads the sorted vector, and k is known
before anything has run, the sort becomes `nth`: a radix select over the bit patterns, three passes over `v`. Floats
only; the element found is the same, a zero always +0.
"""

from collections.abc import Sequence
from dataclasses import replace

from penstock.compll.frontend.arithmetic import integer
from penstock.compll.ir import Apply, Expr, Length, Let, Statement, expressions, walk
from penstock.compll.lower.host_known import is_foreseen

SORT, NTH = "sort", "nth"


def select_ranks(statements: Sequence[Statement], fields: Sequence[Expr | str]) -> tuple[Statement, ...]:
    """Return statements in which sorts that only answer one question are selections."""
    made = list(statements)
    for place, statement in enumerate(made):
        if isinstance(statement, Apply) and statement.operator == SORT and statement.element.is_float:
            question = _only_question(statement.name, made, fields)
            if question is not None:
                made[place] = _selection(statement, question)
                made[place + 1 :] = [_answered(item, question) for item in made[place + 1 :]]
    return tuple(made)


def _only_question(name: str, statements: Sequence[Statement], fields: Sequence[Expr | str]) -> Expr | None:
    """Return the one `name[k]` that a program reads, in a scalar and with k foreseen; None where it reads more."""
    if name in fields or any(isinstance(item, Apply) and name in item.vectors for item in statements):
        return None
    inside: dict[int, tuple[Expr, Statement | None]] = {
        id(node): (node, item) for item in statements for expr in expressions(item) for node in walk(expr)
    }
    inside |= {id(node): (node, None) for expr in fields if isinstance(expr, Expr) for node in walk(expr)}
    reads = [(node, item) for node, item in inside.values() if node.op in ("element", "at") and node.value == name]
    if len(reads) != 1 or not isinstance(reads[0][1], Let) or reads[0][0].op != "at":
        return None
    question = reads[0][0]
    return question if is_foreseen(question.args[0], {item.name: item for item in statements}) else None


def _selection(sort: Apply, question: Expr) -> Apply:
    descending = sort.scalars[-1]
    length = Length(sort.name)
    return replace(sort, operator=NTH, length=length, scalars=(question.args[0], descending), bound=integer(1))


def _answered(statement: Statement, question: Expr) -> Statement:
    """Return a statement that reads the element found where it asked for one of many."""
    if not isinstance(statement, Let):
        return statement
    memo = {id(question): replace(question, args=(integer(0),))}
    return replace(statement, expr=_put(statement.expr, memo))


def _put(expr: Expr, memo: dict[int, Expr]) -> Expr:
    if id(expr) not in memo:
        args = tuple(_put(argument, memo) for argument in expr.args)
        same = all(a is b for a, b in zip(args, expr.args, strict=True))
        memo[id(expr)] = expr if same else replace(expr, args=args)
    return memo[id(expr)]
