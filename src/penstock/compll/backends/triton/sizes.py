"""What follows from a gradient's size and the parameters: how much memory a call needs, before it runs."""

from collections.abc import Mapping
from typing import Any

from penstock.compll.backends.reference.machine import evaluate_static
from penstock.compll.ir import GRADIENT, Apply, Expr, Filter, Length, Program
from penstock.compll.lower.host_known import foresee
from penstock.compll.lower.payload_layout import max_nbytes
from penstock.compll.types import Vector


class Sizes:
    """What follows from a gradient's size and the parameters: the most elements of every vector, and static scalars."""

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
        """Return a scalar that size and parameters settle."""
        if id(expr) not in self._scalars:
            self._scalars[id(expr)] = int(foresee(expr, self.numel, self.arguments, self._statements))
        return self._scalars[id(expr)]
