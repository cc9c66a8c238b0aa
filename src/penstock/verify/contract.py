"""The last stage of a proof: at the end every rank holds what the collective promises.

Nothing is lost in a codec, and nothing comes twice: the residuals of all ranks account for every rounding. Each time a
rank encodes v, its output is some P and its residual grows by v - P. So for each element

    result + sum over encodings (v - P) = sum over ranks of their own data

must hold whatever the codec makes of v: as an equation in which every P is a symbol of its own. Where it does, the sum
of data and residuals over all ranks is the same before and after. A value that is encoded and then used dense, an
output that goes nowhere, or a sum that two ranks encode, both keeping the rest, do not cancel.
"""

from collections import Counter
from collections.abc import Iterator
from functools import partial

from penstock.program import DATA, Collective, Program, Slice, split
from penstock.verify.arithmetic import Encoding, Loss
from penstock.verify.findings import Finding, Kind, blame
from penstock.verify.machine import Run
from penstock.verify.memory import SegmentMap, Value


def check_contract(program: Program, run: Run) -> list[Finding]:
    """Compare what the ranks hold after `run` with what the program promises, one finding per rank and kind."""
    found: dict[tuple[int, Kind], Finding] = {}
    for rank in range(program.world_size):
        for finding in _check_rank(program, run, rank):
            found.setdefault((rank, finding.kind), finding)
    for finding in _check_kept(program, run):
        found.setdefault((finding.rank, finding.kind), finding)
    return list(found.values())


def promised(program: Program, rank: int) -> list[tuple[int, int, int]]:
    """Return (start, stop, contributors) for the elements of `rank` that the collective says something about."""
    everyone, numel = (1 << program.world_size - program.servers) - 1, program.numel
    if program.collective is Collective.ALL_REDUCE:
        return [(0, numel, everyone)] if rank < program.world_size - program.servers else []
    if program.collective is Collective.REDUCE:
        return [(0, numel, everyone)] if rank == program.root else []
    if program.collective is Collective.BROADCAST:
        return [(0, numel, 1 << program.root)]
    chunks = split(numel, program.world_size)
    if program.collective is Collective.REDUCE_SCATTER:
        return [(*chunks[rank], everyone)]
    return [(start, stop, 1 << owner) for owner, (start, stop) in enumerate(chunks)]


def _check_rank(program: Program, run: Run, rank: int) -> Iterator[Finding]:
    for start, stop, wanted in promised(program, rank):
        for low, high, value in run.memories[rank].read(Slice(DATA, start, stop)):
            assert value is not None or run.findings, "data is filled from the start"
            if value is not None:
                yield from _check_value(run, rank, low, high, value, wanted, _servers(program))
                yield from _check_same(program, run, rank, low, high, value)


def _check_kept(program: Program, run: Run) -> Iterator[Finding]:
    """Check what merges of encoded blocks leave out: kept once if the block is part of a result, and else not at all.

    Several ranks may merge the same blocks and leave out the same values. Nothing of the sum is lost, and nothing
    comes twice, if exactly one of them keeps these.
    """
    results = (v for rank in run.memories for _, _, v in rank.read(Slice(DATA, 0, program.numel)) if v is not None)
    used = run.arithmetic.expressions.within(value.expression for value in results)
    for expression, cuts in run.arithmetic.cuts.items():
        keepers = [cut for cut in cuts if cut.keeps]
        where = ", ".join(f"rank {cut.rank} in step {cut.step}" for cut in cuts)
        if expression in used and not keepers:
            detail = f"drops what does not fit, and no rank keeps it: {where}"
            yield blame(program, Kind.LOST, cuts[0].rank, cuts[0].index, detail, cuts[0].step)
        for cut in keepers[1 if expression in used else 0 :]:
            detail = f"keeps what is kept or applied elsewhere too: {where}"
            yield blame(program, Kind.KEPT_TWICE, cut.rank, cut.index, detail, cut.step)


def _servers(program: Program) -> int:
    """Return the ranks that give zeros, which may be in any sum."""
    workers = program.world_size - program.servers
    return ((1 << program.servers) - 1) << workers


def _check_value(
    run: Run, rank: int, low: int, high: int, value: Value, wanted: int, allowed: int
) -> Iterator[Finding]:
    where, held = f"{DATA}[{low}:{high}]", run.arithmetic.expressions.contributors(value.expression)
    if value.shift:
        detail = f"{where} ends with elements {low + value.shift} to {high + value.shift}"
        yield Finding(Kind.WRONG_ELEMENT, rank, value.writer, None, detail)
        return
    if wanted & ~held:
        loss = _loss(run.arithmetic.losses, rank, low, high, wanted & ~held)
        parts = f"{where} ends without the data of ranks {_list(wanted & ~held)}"
        if loss is not None:
            detail = f"{parts}; it was there before this instruction replaced it"
            yield Finding(Kind.OVERWRITTEN, loss.rank, loss.index, loss.step, detail)
        else:
            yield Finding(Kind.MISSING, rank, value.writer, None, parts)
    if held & ~wanted & ~allowed:
        detail = f"{where} ends with the data of ranks {_list(held & ~wanted & ~allowed)} in it"
        yield Finding(Kind.FOREIGN, rank, value.writer, None, detail)


def _loss(losses: list[Loss], rank: int, low: int, high: int, missing: int) -> Loss | None:
    """Return the write that lost what is missing, on this rank rather than on another."""
    fitting = [one for one in losses if one.start < high and low < one.stop and one.contributors & missing]
    return min(fitting, key=lambda one: (one.rank != rank, one.step), default=None)


def _check_same(program: Program, run: Run, rank: int, low: int, high: int, value: Value) -> Iterator[Finding]:
    """Compare with rank 0, where all ranks must end with the same: the same order of summation, so the same bits."""
    if program.collective in (Collective.REDUCE, Collective.REDUCE_SCATTER):
        return
    for start, stop, other in run.memories[0].read(Slice(DATA, low, high)):
        same = other is None or other.expression == value.expression
        contributors = run.arithmetic.expressions.contributors
        if not same and other is not None and contributors(other.expression) == contributors(value.expression):
            detail = f"{DATA}[{start}:{stop}] is summed in another order, or coded otherwise, than on rank 0"
            yield Finding(Kind.DIFFERENT_SUMS, rank, value.writer, None, detail)


def _list(contributors: int) -> str:
    return ", ".join(str(rank) for rank in range(contributors.bit_length()) if contributors >> rank & 1)


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
    for server in range(program.world_size - program.servers, program.world_size):
        del balance[expressions.own(server)]  # zeros, which no sum misses
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
