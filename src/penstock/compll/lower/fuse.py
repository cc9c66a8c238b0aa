"""Fusion: from statements to as few passes over memory as the mathematics allows.

A procedure becomes a `Schedule`: scalars, passes and whole-vector operators in the order they run. A `Pass` is one loop
over one length. Maps are not steps: they are computed inside the passes that use them, from what is in memory there.
Everything of one length whose operands are known goes into one pass, so onebit's bits, sums and count are one loop.

Error feedback is fused into encode. Let `total = gradient + residual`. Where decode is a map (every element follows
from its code and some scalars), `residual = total - decoded` is computed in the last pass, from the code just made.
Where it is not (sparse and run-length formats), the first pass leaves `total` in the residual's memory, later ones read
it there, and at the end the payload is decoded and subtracted (`Schedule.subtracts`).

Feedback can also be deferred (`schedule_later`): total = gradient + (residual - decode(last payload)) is left in the
residual's memory, and what this payload carries is subtracted by the next call. One pass then does for onebit, whose
scales are known only at its end.

Blocks: a pass that reduces by block, one over the blocks and one that reads `v[i / n]` are done a stretch of the
gradient at a time (`Tiled`), so that memory is gone over once although the last needs what the first has found.

Example: terngrad's encode takes two passes, the second needing what the first found.

    pass over gradient: min = smaller, max = greater; check gradient
    gap = (max - min) / 3
    pass over gradient: field 4 = pack Q
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.compll.ir import (
    GRADIENT,
    LATEST,
    NUMEL,
    RESIDUAL,
    Apply,
    Decode,
    Encode,
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
from penstock.compll.lower.passes import (
    INPUTS,
    LAST,
    TOTAL,
    Emit,
    Keep,
    Output,
    Pack,
    Pass,
    Scatter,
    Schedule,
    Step,
    Tiled,
    block_read,
    nodes_of,
)
from penstock.compll.types import FLOAT


def schedule_encode(
    program: Program, feedback: bool = False, latest: str = GRADIENT, joins_blocks: bool = False
) -> Schedule:
    """Return encode as passes; with `feedback`, the residual is added first and what was not sent is left in it.

    `latest` is what this step's gradient is called without feedback: where nothing is added, the gradient itself.
    `joins_blocks`: a pass over blocks is done together with the one that reduces them even where that saves no pass
    over the gradient, because it saves a kernel launch.
    """
    levels = Levels()
    if not feedback:
        names = {LATEST: latest}
        levels.add_all(renamed(statement, names, {}) for statement in program.encode.statements)
        return _tiled(levels.encode(program, program.encode.fields, GRADIENT), least=1 if joins_blocks else 2)
    total = Expr("add", FLOAT, (element(GRADIENT), element(RESIDUAL)), name=TOTAL)
    statements, fields = _with_total(program.encode)
    made: list[Statement] = [Map(TOTAL, NUMEL, total), *statements]
    decoded = inlined_decode(program, fields)
    in_memory = read_whole(made) | ({name for item in decoded for name in read_whole([item])} if decoded else set())
    if decoded is None or TOTAL in in_memory:
        levels.keep_first = True
        levels.add_all(made)
        return replace(_tiled(levels.encode(program, fields, TOTAL)), subtracts=True)
    levels.add_all([*made, *decoded])
    schedule = levels.encode(program, fields, TOTAL, kept=decoded[-1].name)
    schedule = schedule if schedule.passes() < 2 else _tiled(schedule)
    if schedule.passes() < 2:
        return schedule
    # Several passes: the first leaves the total in place of the residual, so that later ones read one vector, not two.
    # (Within a stretch both are in the cache, and adding them again takes less than storing their sum.)
    levels = Levels(keep_first=True)
    levels.add_all([*made, *decoded])
    return _tiled(levels.encode(program, fields, TOTAL, kept=decoded[-1].name))


def schedule_later(program: Program) -> Schedule | None:
    """Return encode with deferred feedback; None where decode is not element-wise."""
    before = last_decode(program)
    if before is None:
        return None
    statements, fields = _with_total(program.encode)
    kept = Expr("sub", FLOAT, (element(RESIDUAL), element(f"{LAST}_{program.decode.result}")), name="kept")
    total = Map(TOTAL, NUMEL, Expr("add", FLOAT, (element(GRADIENT), kept), name=TOTAL))
    levels = Levels(keep_first=True)
    levels.add_all([*before, total, *statements])
    return _tiled(levels.encode(program, fields, TOTAL))


def _tiled(schedule: Schedule, least: int = 2) -> Schedule:
    """Return a schedule in which neighbouring passes are done together where `least` or more go over the gradient."""
    steps: list[Step] = []
    run: list[Pass] = []
    for step in (*schedule.steps, None):
        if isinstance(step, Pass) and _joins(step, run, schedule):
            run.append(step)
            continue
        steps += _together(run, schedule, least)
        run = [step] if isinstance(step, Pass) and _joins(step, [], schedule) else []
        steps += [step] if step is not None and not run else []
    return replace(schedule, steps=tuple(steps))


def _joins(step: Pass, run: Sequence[Pass], schedule: Schedule) -> bool:
    """Whether a pass uses, of the results of those before, only the ones for the same stretch of the gradient."""
    if step.length.of != GRADIENT or any(isinstance(item, Filter | Emit | Scatter) for item in step.outputs):
        return False
    outputs = [output for before in run for output in before.outputs]
    scalars = {output.name for output in outputs if isinstance(output, Reduce)}
    made = {output.name for output in outputs if isinstance(output, GroupReduce)}
    made |= {output.vector for output in outputs if isinstance(output, Keep)}
    for node in nodes_of(step):
        if node.op == "name" and node.value in scalars:
            return False
        if node.op == "at" and node.value in made and not block_read(node, step, schedule):
            return False
    return True


def _together(run: Sequence[Pass], schedule: Schedule, least: int) -> Sequence[Step]:
    if len(run) < 2 or sum(step.length == NUMEL for step in run) < least:
        return run
    made = {output.name for step in run for output in step.outputs if isinstance(output, GroupReduce)}
    made |= {o.vector for step in run for o in step.outputs if isinstance(o, Keep) and o.to not in INPUTS}
    others = [step for step in schedule.each_pass() if not any(step is each for each in run)]
    read = {name for step in others for name in step.inputs}
    read |= {node.value for step in others for node in nodes_of(step) if node.op == "at"}
    read |= {name for step in schedule.steps if isinstance(step, Apply) for name in step.vectors}
    read |= {n.value for step in schedule.steps if isinstance(step, Let) for n in walk(step.expr) if n.op == "at"}
    return [Tiled(tuple(run), frozenset(made - read))]


def _with_total(encode: Encode) -> tuple[list[Statement], tuple[Expr | str, ...]]:
    """Return encode's statements and fields as they are with feedback: of the total instead of the gradient."""
    names = {GRADIENT: TOTAL, LATEST: GRADIENT}
    memo: dict[int, Expr] = {}
    statements = [renamed(statement, names, memo) for statement in encode.statements]
    return statements, tuple(item if isinstance(item, str) else rename(item, names, memo) for item in encode.fields)


def schedule_decode(program: Program, unpacks: bool = True) -> Schedule:
    """Return decode as passes; the result goes to an `Emit` or a `Scatter`, which may also add.

    `unpacks` says that a field read out of order is unpacked to memory first; a GPU reads it where it is.
    """
    return Levels(unpacks=unpacks).decode(program.decode)


def read_whole(statements: Sequence[Statement], unpacks: bool = True) -> set[str]:
    """Return the vectors that some statement reads out of order, which must therefore be in memory."""
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
    computed: dict[str, int] = field(default_factory=dict)  # when element i of a map can be computed inside a pass
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
                self.computed[statement.name] = level
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
        if name in self.computed or name not in self.vectors:
            return self.computed.get(name, 0)
        return self.ready[name]

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
        if kept is not None:  # in place: no later pass may read the old residual
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


def element(name: str) -> Expr:
    """Return element i of an input."""
    return Expr("element", FLOAT, value=name)


def rename(expr: Expr, names: Mapping[str, str], memo: dict[int, Expr]) -> Expr:
    """Return an expression that reads other vectors; shared parts stay shared. Sizes are left alone.

    The gradient less itself, what is owed where nothing is, becomes 0: a gradient that is not finite is refused.
    """
    if id(expr) not in memo:
        args = tuple(rename(argument, names, memo) for argument in expr.args)
        value = names.get(expr.value, expr.value) if expr.op in ("element", "at", "name") else expr.value
        same = value == expr.value and all(a is b for a, b in zip(args, expr.args, strict=True))
        made = expr if same else replace(expr, args=args, value=value)
        nothing = made.op == "sub" and all(each.op == "element" and each.value == GRADIENT for each in args)
        memo[id(expr)] = Expr("const", FLOAT, value=0.0) if nothing else made
    return memo[id(expr)]


def renamed(statement: Statement, names: Mapping[str, str], memo: dict[int, Expr]) -> Statement:
    """Return a statement that reads other vectors."""
    match statement:
        case Let() | Map() | GroupReduce() | Reduce():
            return replace(statement, expr=rename(statement.expr, names, memo))
        case Filter():
            keep, value = (rename(expr, names, memo) for expr in (statement.keep, statement.value))
            return replace(statement, keep=keep, value=value)
        case Apply():
            vectors = tuple(names.get(name, name) for name in statement.vectors)
            scalars = tuple(rename(scalar, names, memo) for scalar in statement.scalars)
            return replace(statement, vectors=vectors, scalars=scalars)
        case Read():
            return statement


def inlined_decode(program: Program, fields: tuple[Expr | str, ...]) -> list[Statement] | None:
    """Return decode's statements reading encode's own vectors and scalars, and the residual they leave; None where it
    is not element-wise."""
    decode = program.decode
    if not all(isinstance(item, Let | Map | Read) for item in decode.statements):
        return None
    names = {item.name: f"{item.name}_back" for item in decode.statements}
    for item in decode.statements:
        if isinstance(item, Read):
            source = fields[item.field]
            assert isinstance(source, str)
            names[item.name] = source
    memo: dict[int, Expr] = {}
    made: list[Statement] = []
    for item in decode.statements:
        if isinstance(item, Let | Map):
            _put_fields(item.expr, fields, memo)
            made.append(replace(renamed(item, names, memo), name=names[item.name]))
    if names[decode.result] not in {item.name for item in made}:
        return None
    left = Expr("sub", FLOAT, (element(TOTAL), element(names[decode.result])), name=RESIDUAL)
    return [*made, Map("left", NUMEL, left)]


def last_decode(program: Program) -> list[Statement] | None:
    """Return decode's statements, renamed, for the previous payload: the part of the residual that was sent.

    None where decode is not element-wise: subtracting a sparse payload at once costs next to nothing.
    """
    decode = program.decode
    is_elementwise = all(isinstance(item, Let | Map | Read) for item in decode.statements)
    if not is_elementwise or any(field.counts for field in program.layout.fields):
        return None
    names = {item.name: f"{LAST}_{item.name}" for item in decode.statements}
    memo: dict[int, Expr] = {}
    return [replace(renamed(item, names, memo), name=names[item.name]) for item in decode.statements]


def _put_fields(expr: Expr, fields: tuple[Expr | str, ...], memo: dict[int, Expr]) -> None:
    """Map every `field` of an expression to the scalar that encode writes there, in `memo`."""
    for node in walk(expr):
        if node.op == "field":
            source = fields[node.value]
            assert isinstance(source, Expr)
            memo[id(node)] = source
