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

Example: terngrad's encode takes two passes, the second needing what the first found.

    pass over gradient: min = smaller, max = greater; check gradient
    gap = (max - min) / 3
    pass over gradient: field 4 = pack Q
"""

from dataclasses import replace

from penstock.compll.feedback import element, inlined_decode, last_decode, rename, renamed
from penstock.compll.ir import GRADIENT, LATEST, NUMEL, RESIDUAL, Encode, Expr, Map, Program, Statement
from penstock.compll.levels import Levels, read_whole
from penstock.compll.schedule import LAST, TOTAL, Schedule
from penstock.compll.types import FLOAT


def schedule_encode(program: Program, feedback: bool = False, latest: str = GRADIENT) -> Schedule:
    """Return encode as passes; with `feedback`, the residual is added first and what was not sent is left in it.

    `latest` is what this step's gradient is called without feedback: where nothing is added, the gradient itself.
    """
    levels = Levels()
    if not feedback:
        names = {LATEST: latest}
        levels.add_all(renamed(statement, names, {}) for statement in program.encode.statements)
        return levels.encode(program, program.encode.fields, GRADIENT)
    total = Expr("add", FLOAT, (element(GRADIENT), element(RESIDUAL)), name=TOTAL)
    statements, fields = _with_total(program.encode)
    made: list[Statement] = [Map(TOTAL, NUMEL, total), *statements]
    decoded = inlined_decode(program, fields)
    in_memory = read_whole(made) | ({name for item in decoded for name in read_whole([item])} if decoded else set())
    if decoded is None or TOTAL in in_memory:
        levels.keep_first = True
        levels.add_all(made)
        return replace(levels.encode(program, fields, TOTAL), subtracts=True)
    levels.add_all([*made, *decoded])
    schedule = levels.encode(program, fields, TOTAL, kept=decoded[-1].name)
    if schedule.passes() < 2:
        return schedule
    # Several passes: the first leaves the total in place of the residual, so that later ones read one vector, not two.
    levels = Levels(keep_first=True)
    levels.add_all([*made, *decoded])
    return levels.encode(program, fields, TOTAL, kept=decoded[-1].name)


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
    return levels.encode(program, fields, TOTAL)


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
