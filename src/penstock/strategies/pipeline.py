"""The order in which a rank of a pipelined strategy issues what it receives, merges and sends.

A strategy says for one rank which blocks of `data` arrive, in order, and which leave, each after a certain arrival.
`emit` turns that into instructions: receives are posted `DEPTH` blocks ahead, so that the next block travels while
this one is merged, and a block leaves as soon as the arrival it waits for is merged. A block to be merged arrives in
one of `DEPTH` scratch slots used in turn; any other arrives in its place in `data`.

    a middle rank of a reduce chain, blocks a b c, DEPTH 2:

    recv inbox[0] a   recv inbox[1] b   merge a   send a   recv inbox[0] c   merge b   send b   merge c   send c
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, takewhile

from penstock.program import DATA, ProgramBuilder, Slice

DEPTH = 4  # blocks received ahead: one travels, one is merged, two absorb uneven arrivals
INBOX = "inbox"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A block of `data` that comes from another rank."""

    source: int
    block: Slice
    merged: bool  # added to what is there; otherwise it replaces it


@dataclass(frozen=True, slots=True)
class Departure:
    """A block of `data` that goes to another rank."""

    target: int
    block: Slice
    after: int = -1  # issued after this many-th arrival (0 is the first); -1: at once


def blocks(start: int, stop: int, block_numel: int) -> list[Slice]:
    """Cut `start` to `stop` of `data` into blocks of at most `block_numel`, as even as possible."""
    count = -(-(stop - start) // max(block_numel, 1))
    edges = [start + (stop - start) * i // count for i in range(count + 1)] if count else []
    return [Slice(DATA, low, high) for low, high in pairwise(edges)]


def declare_inbox(builder: ProgramBuilder, block_numel: int) -> None:
    """Declare the scratch slots that `emit` uses for blocks of up to `block_numel`."""
    builder.scratch(INBOX, DEPTH * block_numel)


def emit(
    builder: ProgramBuilder, rank: int, arrivals: Sequence[Arrival], departures: Sequence[Departure], block_numel: int
) -> None:
    """Issue one rank's whole pipeline; `departures` are issued in their order, none before its `after`."""
    slots: dict[int, Slice] = {}
    posted, left = 0, 0
    for done in range(-1, len(arrivals)):
        if done in slots:
            builder.merge(rank, arrivals[done].block, slots[done])
        while left < len(departures) and departures[left].after <= done:
            builder.send(rank, departures[left].target, departures[left].block)
            left += 1
        while posted < min(done + 1 + DEPTH, len(arrivals)):
            if _still_needed(arrivals[done + 1 : posted], departures[left:], posted, arrivals[posted]):
                break
            _post(builder, rank, arrivals[posted], slots, posted, block_numel)
            posted += 1
    assert left == len(departures), "a block leaves after an arrival that does not happen"
    assert posted == len(arrivals), "a block arrives before what it replaces has left"


def _still_needed(waiting: Sequence[Arrival], departures: Sequence[Departure], index: int, arrival: Arrival) -> bool:
    """Say whether what arrival `index` would replace has yet to be merged or sent: then it is too early to post it."""
    if arrival.merged:
        return False  # it lands in a slot
    unsent = (one.block for one in takewhile(lambda one: one.after < index, departures))
    unmerged = (one.block for one in waiting)
    return any(block.overlaps(arrival.block) for block in chain(unsent, unmerged))


def _post(
    builder: ProgramBuilder, rank: int, arrival: Arrival, slots: dict[int, Slice], index: int, block_numel: int
) -> None:
    target = arrival.block
    if arrival.merged:
        start = len(slots) % DEPTH * block_numel
        target = slots[index] = Slice(INBOX, start, start + arrival.block.numel)
    builder.recv(rank, arrival.source, target)
