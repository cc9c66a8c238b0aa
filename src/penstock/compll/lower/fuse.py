"""Fusion: from statements to as few passes over memory as the mathematics allows.

A procedure becomes a `Schedule`: scalars, passes and whole-vector operators in the order they run. A `Pass` is one loop
over one length. Maps are not steps: they are computed inside the passes that use them, from what is in memory there.
Everything of one length whose operands are known goes into one pass, so onebit's bits, sums and count are one loop.

Error feedback is fused into encode. Let `total = gradient + residual`. Where decode is a map (every element follows
from its code and some scalars), `residual = total - decoded` is computed in the last pass, from the code just made.
Where it is not (sparse and run-length formats), the first pass leaves `total` in the residual's memory, later ones read
it there, and at the end the payload is decoded and subtracted (`Schedule.subtracts`).

Feedback can also be put off (`schedule_later`): total = gradient + (residual - decode(last payload)) is left in the
residual's memory, and what this payload carries is taken off by the next call. One pass then does for onebit, whose
scales are known only at its end.

Blocks: a pass that reduces by block, one over the blocks and one that reads `v[i / n]` are done a stretch of the
gradient at a time (`Tiled`), so that memory is gone over once although the last needs what the first has found.

Example: terngrad's encode takes two passes, the second needing what the first found.

    pass over gradient: min = smaller, max = greater; check gradient
    gap = (max - min) / 3
    pass over gradient: field 4 = pack Q
"""

from collections.abc import Sequence
from dataclasses import replace

from penstock.compll.ir import (
    GRADIENT,
    LATEST,
    NUMEL,
    RESIDUAL,
    Apply,
    Encode,
    Expr,
    Filter,
    GroupReduce,
    Let,
    Map,
    Program,
    Reduce,
    Statement,
    walk,
)
from penstock.compll.lower.feedback import element, inlined_decode, last_decode, rename, renamed
from penstock.compll.lower.levels import Levels, read_whole
from penstock.compll.lower.passes import (
    INPUTS,
    LAST,
    TOTAL,
    Emit,
    Keep,
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
    if schedule.passes() < 2:
        return schedule
    # Several passes: the first leaves the total in place of the residual, so that later ones read one vector, not two.
    levels = Levels(keep_first=True)
    levels.add_all([*made, *decoded])
    return _tiled(levels.encode(program, fields, TOTAL, kept=decoded[-1].name))


def schedule_later(program: Program) -> Schedule | None:
    """Return encode with feedback put off; None where decode is not element-wise."""
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
    """Whether a pass needs of those before only what they leave for the same stretch of the gradient."""
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
