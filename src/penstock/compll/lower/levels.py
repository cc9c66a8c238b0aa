"""Which pass a statement belongs to: the first one before which everything it needs is known."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from penstock.compll.ir import (
    NUMEL,
    RESIDUAL,
    Apply,
    Decode,
    Expr,
    Filter,
    GroupReduce,
    Length,
    Let,
    Map,
    Program,
    Read,
    Reduce,
    Statement,
    VectorStatement,
    element_of,
    expressions,
    walk,
)
from penstock.compll.lower.passes import INPUTS, TOTAL, Emit, Keep, Output, Pack, Pass, Scatter, Schedule, Step
from penstock.compll.types import FLOAT


def read_whole(statements: Sequence[Statement], unpacks: bool = True) -> set[str]:
    """Return the vectors that somebody reads out of order, so that they must be in memory."""
    applied: set[str] = set()
    indexed: set[str] = set()
    for statement in statements:
        applied |= set(statement.vectors) if isinstance(statement, Apply) else set()
        indexed |= {node.value for expr in expressions(statement) for node in walk(expr) if node.op == "at"}
    packed = {statement.name for statement in statements if isinstance(statement, Read)}
    return applied | (indexed if unpacks else indexed - packed)


@dataclass(slots=True)
class Levels:
    """Gives every statement a level: the number of passes that must have ended before it can start."""

    statements: list[Statement] = field(default_factory=list)
    vectors: dict[str, VectorStatement] = field(default_factory=dict)
    ready: dict[str, int] = field(default_factory=dict)  # when a scalar, or a vector in memory, is there
    lets: list[tuple[int, Let]] = field(default_factory=list)
    applies: list[tuple[int, Apply]] = field(default_factory=list)
    outputs: dict[tuple[int, Length], list[Output]] = field(default_factory=dict)
    keep_first: bool = False  # leave the total in the residual's memory at once
    unpacks: bool = True  # fields of the payload that are read out of order are kept in memory
    last: int = 0

    def add_all(self, statements: Iterable[Statement]) -> None:
        """Place statements; each finds what it needs already placed."""
        self.statements += list(statements)
        whole = read_whole(self.statements, self.unpacks)
        for statement in self.statements:
            if not isinstance(statement, Let | Reduce):
                self.vectors[statement.name] = statement
            self._place(statement, statement.name in whole)

    def _place(self, statement: Statement, is_whole: bool) -> None:
        level = max((self._level(expr) for expr in expressions(statement)), default=0)
        match statement:
            case Let():
                self.lets.append((level, statement))
                self.ready[statement.name] = level
            case Reduce():
                self._output(level, statement.length, statement)
                self.ready[statement.name] = level + 1
            case Filter() | GroupReduce():
                self._output(level, statement.over, statement)
                self.ready[statement.name] = level + 1
            case Apply():
                level = max([level, *(0 if name in INPUTS else self.ready[name] for name in statement.vectors)])
                self.applies.append((level, statement))
                self.ready[statement.name] = level + 1
            case Map() | Read():
                if is_whole or (statement.name == TOTAL and self.keep_first):
                    to = RESIDUAL if statement.name == TOTAL else statement.name
                    self._output(level, statement.length, Keep(statement.name, to, element_of(statement)))
                    self.ready[statement.name] = level + 1

    def _output(self, level: int, length: Length, output: Output) -> None:
        self.outputs.setdefault((level, length), []).append(output)
        self.last = max(self.last, level)

    def _level(self, expr: Expr) -> int:
        return max((self._node(node) for node in walk(expr)), default=0)

    def _node(self, node: Expr) -> int:
        match node.op:
            case "name":
                return self.ready[node.value]
            case "element":
                return self._element(node.value)
            case "at":
                return self._memory(node.value)
            case "size" if node.value in self.vectors and not isinstance(self.vectors[node.value], Map | Read):
                return self.ready[node.value]
        return 0

    def _element(self, name: str) -> int:
        """Return when element i of a vector can be had inside a pass."""
        vector = self.vectors.get(name)
        if isinstance(vector, Map):
            return self._level(vector.expr)
        return 0 if vector is None or isinstance(vector, Read) else self.ready[name]

    def _memory(self, name: str) -> int:
        return (
            0 if name in INPUTS or (isinstance(self.vectors.get(name), Read) and not self.unpacks) else self.ready[name]
        )

    def encode(
        self, program: Program, fields: tuple[Expr | str, ...], checked: str, kept: str | None = None
    ) -> Schedule:
        """Place the fields of the payload, and where there is one the residual, and order everything."""
        offset = 0  # when the place of the next field is known
        for number, source in enumerate(fields):
            if isinstance(source, str):
                vector = self.vectors[source]
                self._output(
                    max(offset, self._element(source)), vector.length, Pack(number, source, element_of(vector))
                )
            counted = program.layout.fields[number].counts
            offset = max(offset, self.ready[counted]) if counted else offset
        if kept is not None:  # in place: nobody may read the old residual after this pass
            last = max([level for level, length in self.outputs if length == NUMEL] + [self._element(kept)])
            self._output(last, NUMEL, Keep(kept, RESIDUAL, FLOAT))
        return Schedule(self._steps(checked), self.vectors)

    def decode(self, decode: Decode) -> Schedule:
        """Place decode's statements and its result."""
        *before, result = decode.statements
        scatters = isinstance(result, Apply) and result.operator == "scatter" and result.name == decode.result
        self.add_all(before if scatters else decode.statements)
        if scatters:
            assert isinstance(result, Apply)
            indices, values = result.vectors
            level = max(self._element(indices), self._element(values))
            self._output(level, self.vectors[indices].length, Scatter(indices, values))
        else:
            made = self.vectors[decode.result]
            self._output(self._element(decode.result), made.length, Emit(decode.result))
        return Schedule(self._steps(""), self.vectors)

    def _steps(self, checked: str) -> tuple[Step, ...]:
        steps: list[Step] = []
        pending = checked
        for level in range(self.last + 2 + max([0, *(at for at, _ in self.applies)])):
            steps += [let for at, let in self.lets if at == level]
            for (at, length), outputs in self.outputs.items():
                if at == level:
                    made = self._pass(level, length, outputs, pending)
                    pending = "" if made.check else pending
                    steps.append(made)
            steps += [apply for at, apply in self.applies if at == level]
        return _check_sent(steps) if pending else tuple(steps)

    def _pass(self, level: int, length: Length, outputs: list[Output], checked: str) -> Pass:
        check = checked if length == NUMEL else ""
        computed, loaded = self._needed(level, outputs, [check] if check else [])
        maps = tuple(item for item in self.statements if isinstance(item, Map) and item.name in computed)
        return Pass(length, tuple(sorted(loaded)), maps, tuple(outputs), check)

    def _needed(self, level: int, outputs: list[Output], roots: list[str]) -> tuple[set[str], set[str]]:
        """Return the vectors a pass touches element by element: maps it computes, and those it loads from memory."""
        computed: set[str] = set()
        loaded: set[str] = set()
        roots = roots + [name for output in outputs for name in _roots(output)]
        while roots:
            name = roots.pop()
            vector = self.vectors.get(name)
            if not isinstance(vector, Map) or self.ready.get(name, level + 1) <= level:
                loaded.add(name)
            elif name not in computed:
                computed.add(name)
                roots += _elements([vector.expr])
        return computed, loaded


def _check_sent(steps: list[Step]) -> tuple[Step, ...]:
    """Check what is sent where no pass goes over the gradient itself (top-k finds what is not finite)."""
    for number, step in enumerate(steps):
        if isinstance(step, Pass):
            sent = [output.vector for output in step.outputs if isinstance(output, Pack) and output.element == FLOAT]
            if sent:
                steps[number] = replace(step, check=sent[0])
                break
    return tuple(steps)


def _roots(output: Output) -> list[str]:
    match output:
        case Reduce() | GroupReduce():
            return _elements([output.expr])
        case Filter():
            return _elements([output.keep, output.value])
        case Pack() | Keep() | Emit():
            return [output.vector]
        case Scatter():
            return [output.indices, output.values]


def _elements(exprs: Iterable[Expr]) -> list[str]:
    return [node.value for expr in exprs for node in walk(expr) if node.op == "element"]
