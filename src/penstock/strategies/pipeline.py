"""The order in which a rank of a pipelined strategy issues what it receives, merges and sends.

A strategy says for one rank which blocks of `data` arrive, in order, and which leave, each after a certain arrival.
`emit` turns that into instructions: receives are posted `DEPTH` blocks ahead, so that the next block travels while
this one is merged, and a block leaves as soon as the arrival it waits for is merged. A block to be merged arrives in
one of `DEPTH` scratch slots used in turn; any other arrives in its place in `data`.

    a middle rank of a reduce chain, blocks a b c, DEPTH 2:

    recv inbox[0] a   recv inbox[1] b   merge a   send a   recv inbox[0] c   merge b   send b   merge c   send c
"""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.program import DATA, Slice
from penstock.program.builder import PartBuilder

DEPTH = 4  # blocks received ahead: one travels, one is merged, two absorb uneven arrivals
INBOX = "inbox"


class Arrival(NamedTuple):
    """A block of `data` that comes from another rank."""

    source: int
    block: Slice
    merged: bool  # added to what is there; otherwise it is a finished sum and replaces it


class Departure(NamedTuple):
    """A block of `data` that goes to another rank."""

    target: int
    block: Slice
    after: int = -1  # issued after this many-th arrival (0 is the first); -1: at once
    finished: bool = False  # the sum over all ranks, which replaces what the target has


def blocks(start: int, stop: int, block_numel: int) -> list[Slice]:
    """Cut `start` to `stop` of `data` into blocks of at most `block_numel`, as even as possible."""
    numel = stop - start
    count = -(-numel // max(block_numel, 1))
    if count == 1:
        return [Slice(DATA, start, stop)]
    return [Slice(DATA, start + numel * i // count, start + numel * (i + 1) // count) for i in range(count)]


def declare_inbox(builder: PartBuilder, block_numel: int) -> None:
    """Declare the scratch slots that `emit` uses for blocks of up to `block_numel`."""
    builder.scratch(INBOX, DEPTH * block_numel)


def emit(
    builder: PartBuilder,
    arrivals: Sequence[Arrival],
    departures: Sequence[Departure],
    block_numel: int,
    *,
    in_turn: bool = False,
) -> None:
    """Issue a rank's whole pipeline; `departures` are issued in their order, none before its `after`.

    With `in_turn` a block leaves only after the one before it has arrived (see `PartBuilder.send`).
    """
    inbox = _Inbox(builder, arrivals, departures, block_numel)
    left, count = 0, len(departures)
    for done in range(-1, len(arrivals)):
        inbox.merge(done)
        inbox.post_ahead(done, left)  # before each send, which may have to wait
        while left < count and departures[left].after <= done:
            target, block, _, finished = departures[left]
            builder.send(target, block, in_turn=in_turn, finished=finished)
            left += 1
            inbox.post_ahead(done, left)
    assert left == count, "a block leaves after an arrival that does not happen"
    assert inbox.posted == len(arrivals), "a block arrives before what it replaces has left"


class _Inbox:
    """The receives of one rank: posted ahead, into slots where they are to be merged."""

    def __init__(
        self, builder: PartBuilder, arrivals: Sequence[Arrival], departures: Sequence[Departure], block_numel: int
    ) -> None:
        self.builder, self.block_numel = builder, block_numel
        self.arrivals, self.departures = arrivals, departures
        self.slots: dict[int, Slice] = {}  # arrival: where it lands
        self.settled: dict[int, int] = {}  # arrival: the instruction that ends it, a merge or the recv itself
        self.posted = 0

    def merge(self, index: int) -> None:
        """Merge arrival `index` if it is one to be merged."""
        if index in self.slots:
            self.settled[index] = self.builder.issued
            self.builder.merge(self.arrivals[index].block, self.slots[index])

    def post_ahead(self, done: int, left: int) -> None:
        """Post receives up to `DEPTH` after arrival `done`, as far as what they replace has been used."""
        if self.posted > done + DEPTH:  # most often
            return
        last = min(done + 1 + DEPTH, len(self.arrivals))
        while self.posted < last and not self._too_early(done, left):
            source, target, merged = self.arrivals[self.posted]
            if merged:
                start = len(self.slots) % DEPTH * self.block_numel
                target = self.slots[self.posted] = Slice(INBOX, start, start + target.stop - target.start)
            before = self.posted - DEPTH  # so that no engine has more than DEPTH receives waiting
            self.settled[self.posted] = self.builder.issued
            self.builder.recv(source, target, after=(self.settled[before],) if before >= 0 else ())
            self.posted += 1

    def _too_early(self, done: int, left: int) -> bool:
        """Say whether what the next receive would replace has yet to be merged or sent."""
        _, block, merged = self.arrivals[self.posted]
        if merged:
            return False  # it lands in a slot
        while left < len(self.departures) and self.departures[left].after < self.posted:
            if self.departures[left].block.overlaps(block):
                return True
            left += 1
        for place in range(done + 1, self.posted):
            other = self.arrivals[place].block
            if other.start < block.stop and block.start < other.stop:  # `overlaps`, without a call
                return True
        return False
