"""Which parts of a procedure can share one pass over memory, and in which order the passes run.

A value's stage is the number of passes that must be finished before it can be computed: elements of the gradient are of
stage 0, a reduction over values of stage s is finished by a pass of stage s and can be used from s + 1 on. All that has
the same stage and length goes into one pass: for onebit the packed signs, the two sums and the count; for TernGrad the
smallest and the greatest value in one, and the levels, which need both, in the next.

Maps are not computed ahead: whoever uses one evaluates its expression where it stands. Only a vector that an operator
on whole vectors or an index reads is kept in memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.compll.ir import (
    GRADIENT,
    LATEST,
    Apply,
    Encode,
    Expr,
    Filter,
    GroupReduce,
    Layout,
    Length,
    Let,
    Map,
    Read,
    Reduce,
    Statement,
    expressions,
    walk,
)


@dataclass(slots=True)
class Pass:
    """One loop over a length."""

    length: Length
    reduces: list[Reduce] = field(default_factory=list)
    keeps: list[Map] = field(default_factory=list)  # vectors written to memory
    fields: list[int] = field(default_factory=list)  # vector fields of the payload written here


Step = Pass | Filter | GroupReduce | Apply


@dataclass(frozen=True, slots=True)
class Stages:
    """The steps of a procedure in an order they can run in, and when scalars are known."""

    steps: tuple[tuple[int, Step], ...]  # with their stage, ascending
    maps: Mapping[str, Map]  # by vector: what to evaluate where it is used
    lets: Mapping[str, Let]
    scalar_fields: Mapping[int, int]  # encode's scalar fields -> stage from which they are known


class Planner:
    """Finds the stage of every value of a procedure."""

    def __init__(self, statements: tuple[Statement, ...]) -> None:
        self.maps = {s.name: s for s in statements if isinstance(s, Map)}
        self.lets = {s.name: s for s in statements if isinstance(s, Let)}
        self.kept = {name for s in statements for name in _in_memory(s)}
        self.applied = {name for s in statements if isinstance(s, Apply) for name in s.vectors}
        self.known: dict[str, int] = {GRADIENT: 0, LATEST: 0}  # scalars, and vectors and sizes that are in memory
        self.passes: dict[tuple[int, Length], Pass] = {}
        self.others: list[tuple[int, Step]] = []
        for statement in statements:
            self._place(statement)

    def need(self, expr: Expr) -> int:
        """Return the stage of an expression."""
        return max((self._need(node) for node in walk(expr)), default=0)

    def _need(self, node: Expr) -> int:
        match node.op:
            case "element" if node.value in self.maps:
                return self.need(self.maps[node.value].expr)
            case "name" if node.value in self.lets:
                return self.need(self.lets[node.value].expr)
            case "element" | "name" | "at":
                return self.known[node.value]
            case "size":
                return self.known.get(node.value, 0)
        return 0

    def over(self, length: Length) -> int:
        """Return the stage from which a length is known."""
        return self.known.get(length.of, 0)

    def at(self, stage: int, length: Length) -> Pass:
        """Return the pass over `length` in a stage."""
        return self.passes.setdefault((stage, length), Pass(length))

    def _place(self, statement: Statement) -> None:
        stage = max((self.need(expr) for expr in expressions(statement)), default=0)
        match statement:
            case Let():
                return
            case Read():
                self.known[statement.name] = 0  # `at` reads it where it is packed
                if statement.name not in self.applied:
                    return
                copy = Expr("element", statement.element, value=statement.name)
                self.at(0, statement.length).keeps.append(Map(statement.name, statement.length, copy))
            case Map():
                if statement.name not in self.kept:
                    return
                stage = max(stage, self.over(statement.length))
                self.at(stage, statement.length).keeps.append(statement)
            case Reduce():
                stage = max(stage, self.over(statement.length))
                self.at(stage, statement.length).reduces.append(statement)
            case GroupReduce() | Filter():
                stage = max(stage, self.over(statement.over))
                self.others.append((stage, statement))
            case Apply():
                stage = max([stage, *(self.known[name] for name in statement.vectors)])
                self.others.append((stage, statement))
        self.known[statement.name] = stage + 1


def _in_memory(statement: Statement) -> set[str]:
    """Return the vectors a statement needs in memory."""
    gathered = {node.value for expr in expressions(statement) for node in walk(expr) if node.op == "at"}
    return gathered | set(statement.vectors) if isinstance(statement, Apply) else gathered


def encode_stages(encode: Encode, layout: Layout) -> Stages:
    """Return the steps of an encode; a field is written as soon as its value and its place are known."""
    planner = Planner(encode.statements)
    place, scalar_fields = 0, {}
    for number, (item, source) in enumerate(zip(layout.fields, encode.fields, strict=True)):
        if isinstance(source, Expr):
            scalar_fields[number] = max(place, planner.need(source))
        else:
            assert item.length is not None
            vector = planner.maps.get(source)
            stage = planner.need(vector.expr) if vector else planner.known[source]
            planner.at(max(place, stage, planner.over(item.length)), item.length).fields.append(number)
            place = max(place, planner.over(item.length))  # later fields stand behind this one
    return _stages(planner, scalar_fields)


def decode_stages(statements: tuple[Statement, ...]) -> Stages:
    """Return the steps of a decode; the result is left to the caller."""
    return _stages(Planner(statements), {})


def _stages(planner: Planner, scalar_fields: dict[int, int]) -> Stages:
    steps = [*((stage, item) for (stage, _), item in planner.passes.items()), *planner.others]
    return Stages(tuple(sorted(steps, key=lambda step: step[0])), planner.maps, planner.lets, scalar_fields)
