"""Elaboration of the operators on vectors: how `map`, `reduce`, `filter`, ... become statements of the IR."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.compll.frontend import arithmetic, syntax
from penstock.compll.frontend.apply import same_length, write_apply
from penstock.compll.frontend.concat import concat
from penstock.compll.frontend.scope import Scope, Value, VectorRef, length_of, size_of
from penstock.compll.ir import Expr, Filter, GroupReduce, Length, Reduce
from penstock.compll.types import INT32, MAX_NUMEL

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
                ev.arity(item.name, item)  # raises for a name nobody knows
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
    ev.writer.statements.append(Filter(name, first.length, arithmetic.truth(keep), first.at_i()))
    return VectorRef(name, first.element, Length(name), first.low, first.high)


def lower_reduce(ev: "Evaluator", node: syntax.Call, scope: Scope, hint: str) -> Value:
    """`reduce(v, r)`: one value; `reduce(v, r, n)`: one for each n neighbours, where n is 0 one for all."""
    operands, function, rest = _operands(ev, node, scope, extra=1)
    if len(operands) != 1:
        raise ev.error(node, "reduce takes one vector", "map several into one first")
    expr, length = arithmetic.widen(operands[0].at_i()), operands[0].length
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
    left = arithmetic.binary("-", whole, arithmetic.binary("*", index, arithmetic.integer(block)))
    size = arithmetic.select(arithmetic.compare("lt", left, arithmetic.integer(block)), left, arithmetic.integer(block))
    made = ev.writer.map(hint or "size", Length(length.of, length.group * block), replace(size, low=1, high=block))
    return replace(made, by_block=True)


def _group_reduce(ev: "Evaluator", node: syntax.Call, hint: str, vector: VectorRef, reducer: str, block: int) -> Value:
    if reducer == "fold":
        raise ev.error(node, "groups are reduced by smaller, greater or sum", "use one of those")
    name, expr = ev.writer.fresh(hint or reducer), arithmetic.widen(vector.at_i())
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
        return write_apply(ev, "sort", hint, (vector,), (arithmetic.integer(descending),), vector)
    keys = ev.writer.map("keys", vector.length, ev.call_over(vector.length, function, [vector]))
    return write_apply(ev, "sort_by", hint, (keys, vector), (arithmetic.integer(0),), vector)


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
        wide = ev.writer.map("wide", vector.length, arithmetic.widen(vector.at_i()))
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
    low, high = arithmetic.common(*(ev.scalar(argument, scope) for argument in node.arguments))
    if node.template == "float":
        low, high = arithmetic.to_float(low), arithmetic.to_float(high)
    elif node.template and low.type.is_float:
        raise ev.error(node, "the bounds are floats", "write random<float>(...)")
    stream = ev.writer.stream()
    last = max(low.low, high.high - 1)
    return Expr("random", low.type, (low, high), stream, low.low, last)


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
