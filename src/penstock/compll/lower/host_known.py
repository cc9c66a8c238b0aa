"""Sizes and scalars that the host computes before any kernel has run: from the gradient's size and the parameters.

A GPU counts what a filter keeps, and the host does not wait for the count. But `sample(gradient, n)` has min(n, size)
elements whatever the values are, so sizes of that kind, and scalars computed from them, are known on the host.
"""

from collections.abc import Mapping
from typing import Any

from penstock.compll.backends.reference import Machine, evaluate_static
from penstock.compll.functions import FUNCTIONS
from penstock.compll.ir import GRADIENT, LATEST, Apply, Expr, Filter, Length, Let, Program, Statement, is_static, walk
from penstock.compll.lower.payload_layout import max_nbytes
from penstock.compll.operators import OPERATORS
from penstock.compll.types import Vector
from penstock.errors import CodecError

EXACT = ("sample", "topk", "nth")  # operators that make as many elements as they are asked for, or all there are
UNKNOWN = ("element", "index", "at", "random", "field")


def is_host_known(expr: Expr, statements: Mapping[str, Statement]) -> bool:
    """Whether the host can compute a scalar before the kernels run; `statements` by the name they define."""
    return all(_node_is_known(node, statements) for node in walk(expr))


def _node_is_known(node: Expr, statements: Mapping[str, Statement]) -> bool:
    if node.op == "size":
        return _size_is_known(node.value, statements)
    if node.op == "name":
        made = statements.get(node.value)
        return isinstance(made, Let) and is_host_known(made.expr, statements)
    return node.op not in UNKNOWN


def _size_is_known(vector: str, statements: Mapping[str, Statement]) -> bool:
    if vector in (GRADIENT, LATEST):
        return True
    made = statements.get(vector)
    if not isinstance(made, Apply) or made.operator not in EXACT or made.bound is None:
        return False
    return made.vectors[0] in (GRADIENT, LATEST) and is_static(made.bound)


def host_value(expr: Expr, numel: int, arguments: Mapping[str, Any], statements: Mapping[str, Statement]) -> Any:
    """Return the value of a scalar that `is_host_known`; raise `CodecError` for another."""
    if not is_host_known(expr, statements):
        raise CodecError("an operator's argument is computed from data, which the host cannot know on a GPU")
    machine = Machine(arguments, 0, FUNCTIONS, OPERATORS, counts={GRADIENT: numel, LATEST: numel})
    for node in walk(expr):
        made = statements.get(node.value) if node.op in ("name", "size") else None
        if isinstance(made, Apply):
            assert made.bound is not None
            most = int(evaluate_static(made.bound, numel, arguments))
            machine.counts[node.value] = max(0, min(numel, most))
        elif isinstance(made, Let):
            machine.scalars[node.value] = host_value(made.expr, numel, arguments, statements)
    return machine.value(expr)


class Sizes:
    """The memory one call needs: bytes of the payload, the most elements of each vector, and host-known scalars."""

    def __init__(self, program: Program, procedure: str, numel: int, arguments: Mapping[str, Any]) -> None:
        self.program, self.procedure, self.numel, self.arguments = program, procedure, numel, arguments
        self.nbytes = max_nbytes(program, numel, arguments)
        self.is_exact = not any(item.counts for item in program.layout.fields)
        self.given: dict[str, Any] = {"numel": numel}
        self.given |= {f"float_{name}": float(value) for name, value in arguments.items()}
        self.given |= {f"int_{name}": int(value) for name, value in arguments.items()}
        statements = program.encode.statements if procedure == "encode" else program.decode.statements
        self._statements = {statement.name: statement for statement in statements}
        self._most: dict[Length, int] = {}
        self._scalars: dict[int, int] = {}

    def most(self, length: Length) -> int:
        """Return the most elements a length can have."""
        if length not in self._most:
            self._most[length] = -(-self._most_of(length.of) // length.group)
        return self._most[length]

    def _most_of(self, vector: str) -> int:
        statement = self._statements.get(vector)
        if isinstance(statement, Filter):
            return self.most(statement.over)
        if isinstance(statement, Apply) and statement.bound is not None:
            return max(0, min(self.numel, int(evaluate_static(statement.bound, self.numel, self.arguments))))
        if self.procedure == "encode" or vector == GRADIENT:
            return self.numel
        return self._fitting(vector)

    def _fitting(self, vector: str) -> int:
        """Return how many elements of a vector that decode counts fit into a payload."""
        types = [item.type for item in self.program.layout.fields if item.length == Length(vector)]
        bits = sum(kind.element.bits for kind in types if isinstance(kind, Vector))
        return min(self.numel, self.nbytes * 8 // bits) if bits else self.numel

    def scalar(self, expr: Expr) -> int:
        """Return the value of a host-known scalar."""
        if id(expr) not in self._scalars:
            self._scalars[id(expr)] = int(host_value(expr, self.numel, self.arguments, self._statements))
        return self._scalars[id(expr)]
