"""Nothing is lost in a codec, and nothing comes twice: the residuals of all ranks account for every rounding.

Each time a rank encodes v, its output is some P and its residual grows by v - P. So for each element

    result + sum over encodings (v - P) = sum over ranks of their own data

must hold whatever the codec makes of v: as an equation in which every P is a symbol of its own. Where it does, the sum
of data and residuals over all ranks is the same before and after. A value that is encoded and then used dense, an
output that goes nowhere, or a sum that two ranks encode, both keeping the rest, do not cancel.
"""

from collections import Counter
from functools import partial

from penstock.program import DATA, Collective, Program, Slice
from penstock.program.segments import SegmentMap
from penstock.verify.arithmetic import Encoding
from penstock.verify.findings import Finding, Kind, blame
from penstock.verify.machine import Run

_Held = tuple[Encoding, ...]


def check_conservation(program: Program, run: Run) -> list[Finding]:
    """Check the equation for every element of a reduction that goes through codecs; one finding per encoding."""
    encodings = run.arithmetic.encodings
    if not encodings or program.collective not in (Collective.ALL_REDUCE, Collective.REDUCE):
        return []
    found: dict[tuple[int, int], Finding] = {}
    for start, stop, held in _by_element(program.numel, encodings):
        for low, high, value in run.memories[program.root].read(Slice(DATA, start, stop)):
            assert value is not None
            finding = _unbalanced(program, run, f"{DATA}[{low}:{high}]", value.expression, held)
            if finding is not None:
                found.setdefault((finding.rank, finding.index or 0), finding)
    return list(found.values())


def _by_element(numel: int, encodings: list[Encoding]) -> list[tuple[int, int, _Held]]:
    """Return the encodings of each stretch of elements."""
    nothing: _Held = ()
    held: SegmentMap[_Held] = SegmentMap(numel, nothing)
    for one in encodings:
        held.update(one.start, one.stop, partial(_with, one))
    return held.get(0, numel)


def _with(one: Encoding, before: _Held) -> _Held:
    return (*before, one)


def _unbalanced(program: Program, run: Run, where: str, result: int, held: _Held) -> Finding | None:
    expressions = run.arithmetic.expressions
    balance: Counter[int] = Counter(expressions.terms(result))
    for one in held:
        balance.update(expressions.terms(expressions.encoded_from(one.expression)))
        balance.subtract({one.expression: 1})
    balance.subtract({expressions.own(rank): 1 for rank in range(program.world_size)})
    for one in held:
        if balance[one.expression] < 0:
            detail = f"output for {where} is not in the result, and the residual has only the rest"
            return blame(program, Kind.LOST, one.rank, one.index, f"loses values: its {detail}", one.step)
    if not any(balance.values()):
        return None
    if not held:
        return Finding(Kind.LOST, program.root, None, None, f"{where} is not encoded, though other elements are")
    last = held[-1]
    detail = f"keeps the rest of {where}, which is in the result or in another residual as well"
    return blame(program, Kind.KEPT_TWICE, last.rank, last.index, detail, last.step)
