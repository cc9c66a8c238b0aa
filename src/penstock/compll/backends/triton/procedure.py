"""Encode or decode as kernels see it: what is computed, what is in memory, and where."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.compll.ir import (
    GRADIENT,
    LATEST,
    NUMEL,
    Expr,
    Length,
    Let,
    Map,
    Program,
    Read,
    Reduce,
    Statement,
    element_of,
    walk,
)
from penstock.compll.lower.passes import Schedule
from penstock.compll.types import FLOAT, Scalar


@dataclass(slots=True)
class Procedure:
    """One of a program's two procedures, and where its kernels find values."""

    program: Program
    schedule: Schedule
    payload: str  # pointer to the body that fields are in
    slots: Mapping[str, int]  # scalars that passes leave for one another: reductions, and sizes of counted vectors
    is_encode: bool
    prefix: str = ""  # of local names, where two procedures meet in one kernel
    statements: dict[str, Statement] = field(init=False)
    maps: dict[str, Map] = field(init=False)  # evaluated where they are used
    lets: dict[str, Let] = field(init=False)
    reads: dict[str, Read] = field(init=False)

    def __post_init__(self) -> None:
        self.statements, self.maps, self.lets, self.reads = {}, {}, {}, {}
        self.add(self.program.encode.statements if self.is_encode else self.program.decode.statements)

    def add(self, statements: Sequence[Statement]) -> None:
        """Let kernels see these statements too."""
        self.statements |= {item.name: item for item in statements}
        self.maps |= {item.name: item for item in statements if isinstance(item, Map)}
        self.lets |= {item.name: item for item in statements if isinstance(item, Let)}
        self.reads |= {item.name: item for item in statements if isinstance(item, Read)}

    def scalar_type(self, name: str) -> Scalar:
        """Return the type of a scalar."""
        statement = self.statements[name]
        assert isinstance(statement, Reduce | Let)
        return statement.expr.type

    def element(self, vector: str) -> Scalar:
        """Return the element type of a vector."""
        if vector in (GRADIENT, LATEST):
            return FLOAT
        statement = self.statements[vector]
        assert not isinstance(statement, Let | Reduce)
        return element_of(statement)

    def length(self, vector: str) -> Length:
        """Return the length of a vector."""
        if vector in (GRADIENT, LATEST):
            return NUMEL
        statement = self.statements[vector]
        assert not isinstance(statement, Let)
        return statement.length

    def is_index(self, expr: Expr) -> bool:
        """Say whether an expression is the element's own index, as in `map(range(v.size), f)`."""
        if expr.op == "element" and expr.value in self.maps:
            return self.is_index(self.maps[expr.value].expr)
        return expr.op == "index"

    def needs(self, expr: Expr) -> set[str]:
        """Return what earlier steps must have left for an expression: reductions, sizes, and vectors in memory."""
        found: set[str] = set()
        for node in walk(expr):
            if node.op == "name":
                let = self.lets.get(node.value)
                found |= self.needs(let.expr) if let else {node.value}
            elif node.op in ("size", "at") and node.value not in (GRADIENT, LATEST, *self.reads):
                found.add(node.value)
        return found
