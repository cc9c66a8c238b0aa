"""What the host knows before any kernel has run: sizes and scalars that follow from the gradient's size alone.

A GPU counts what a filter keeps, and the host does not wait to learn it. But `sample(gradient, n)` has min(n, size)
elements whatever the values are, and so what hangs on such sizes and on parameters can be worked out beforehand.
"""

from collections.abc import Mapping
from typing import Any

from penstock.compll.ir import GRADIENT, LATEST, Apply, Expr, Let, Statement, is_static, walk
from penstock.errors import CodecError

EXACT = ("sample", "topk", "nth")  # operators that make as many elements as they are asked for, or all there are
UNKNOWN = ("element", "index", "at", "random", "field")


def is_foreseen(expr: Expr, statements: Mapping[str, Statement]) -> bool:
    """Whether the host can compute a scalar before the kernels run; `statements` by the name they define."""
    return all(_node_is_foreseen(node, statements) for node in walk(expr))


def _node_is_foreseen(node: Expr, statements: Mapping[str, Statement]) -> bool:
    if node.op == "size":
        return _size_is_foreseen(node.value, statements)
    if node.op == "name":
        made = statements.get(node.value)
        return isinstance(made, Let) and is_foreseen(made.expr, statements)
    return node.op not in UNKNOWN


def _size_is_foreseen(vector: str, statements: Mapping[str, Statement]) -> bool:
    if vector in (GRADIENT, LATEST):
        return True
    made = statements.get(vector)
    if not isinstance(made, Apply) or made.operator not in EXACT or made.bound is None:
        return False
    return made.vectors[0] in (GRADIENT, LATEST) and is_static(made.bound)


def foresee(expr: Expr, numel: int, arguments: Mapping[str, Any], statements: Mapping[str, Statement]) -> Any:
    """Return a scalar that `is_foreseen`; raise `CodecError` for another."""
    from penstock.compll.backends.reference.machine import Machine, evaluate_static
    from penstock.compll.functions import FUNCTIONS
    from penstock.compll.operators import OPERATORS

    if not is_foreseen(expr, statements):
        raise CodecError("an operator's argument is computed from data, which the host cannot know on a GPU")
    machine = Machine(arguments, 0, FUNCTIONS, OPERATORS, counts={GRADIENT: numel, LATEST: numel})
    for node in walk(expr):
        made = statements.get(node.value) if node.op in ("name", "size") else None
        if isinstance(made, Apply):
            assert made.bound is not None
            most = int(evaluate_static(made.bound, numel, arguments))
            machine.counts[node.value] = max(0, min(numel, most))
        elif isinstance(made, Let):
            machine.scalars[node.value] = foresee(made.expr, numel, arguments, statements)
    return machine.value(expr)
