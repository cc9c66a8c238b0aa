"""Runs a program on integers with random timing: an independent judge of what `verify` says.

Every rank issues its instructions in order. A message travels at a random moment after both ends are issued; it takes
the sender's memory as it is then, or as it was when the send was issued, at random. Scratch starts as garbage. So a
missing dependency, a wrong order or a wrong place shows in the numbers of some run, and a circle as a standstill.

Its codec is the worst there is: whatever it encodes, it sends something else, at random, and leaves the difference in
the rank's residual. So two ranks that should end with the same bits do so only if they decode the same payloads, and
result and residuals add up to what was there before only if everything was encoded, applied and kept exactly once.
"""

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from penstock.program import DATA, Collective, Op, Program, Slice, split

Numbers = NDArray[np.int64]
_LARGE = 2**40


def meets_its_contract(program: Program, seed: int) -> bool:
    """Run `program` once with the timing and data of `seed`; say whether every rank ends with what it should."""
    run = _Run(program, np.random.default_rng(seed))
    given = [memory[DATA].copy() for memory in run.memories]
    before = np.sum(run.residuals, axis=0, dtype=np.int64)
    if not run.finish():
        return False
    changed = before - np.sum(run.residuals, axis=0, dtype=np.int64)
    return all(_holds(program, rank, given, changed, run.memories[rank][DATA]) for rank in range(len(given)))


def _holds(program: Program, rank: int, given: list[Numbers], changed: Numbers, held: Numbers) -> bool:
    total: Numbers = np.sum(given, axis=0, dtype=np.int64) + changed
    chunks = split(program.numel, program.world_size)
    if program.collective is Collective.ALL_REDUCE:
        return bool((held == total).all())
    if program.collective is Collective.REDUCE:
        return rank != program.root or bool((held == total).all())
    if program.collective is Collective.BROADCAST:
        return bool((held == given[program.root]).all())
    if program.collective is Collective.REDUCE_SCATTER:
        start, stop = chunks[rank]
        return bool((held[start:stop] == total[start:stop]).all())
    return all(bool((held[a:b] == given[owner][a:b]).all()) for owner, (a, b) in enumerate(chunks))


class _Run:
    def __init__(self, program: Program, rng: np.random.Generator) -> None:
        self.program, self.rng = program, rng
        self.memories = [self._memory() for _ in program.ranks]
        self.residuals = [rng.integers(1, _LARGE, program.numel) for _ in program.ranks]
        self.next = [0] * program.world_size
        self.done = [[False] * len(rank) for rank in program.ranks]
        self.sent: defaultdict[tuple[int, int], list[tuple[int, Numbers | None]]] = defaultdict(list)
        self.posted: defaultdict[tuple[int, int], list[int]] = defaultdict(list)

    def _memory(self) -> dict[str, Numbers]:
        sizes = {DATA: self.program.numel} | {buffer.name: buffer.numel for buffer in self.program.buffers}
        return {name: self.rng.integers(1, _LARGE, size) for name, size in sizes.items()}

    def finish(self) -> bool:
        """Do random things until everything is done (True) or nothing can happen (False)."""
        while True:
            possible = [("issue", (rank, 0)) for rank in range(self.program.world_size) if self._can_issue(rank)]
            possible += [("carry", link) for link in self.sent if self.sent[link] and self.posted[link]]
            if not possible:
                return all(all(done) for done in self.done)
            what, where = possible[self.rng.integers(len(possible))]
            if what == "issue":
                self._issue(where[0])
            elif not self._carry(where):
                return False

    def _can_issue(self, rank: int) -> bool:
        if self.next[rank] == len(self.program.ranks[rank]):
            return False
        return all(self.done[rank][earlier] for earlier in self.program.ranks[rank][self.next[rank]].after)

    def _issue(self, rank: int) -> None:
        index = self.next[rank]
        one = self.program.ranks[rank][index]
        self.next[rank] += 1
        if one.op is Op.SEND:
            early = self._at(rank, one.read).copy() if self.rng.random() < 0.5 else None
            self.sent[rank, one.peer].append((index, early))
        elif one.op is Op.RECV:
            self.posted[one.peer, rank].append(index)
        else:
            assert one.op in (Op.MERGE, Op.COPY, Op.ENCODE, Op.DECODE)
            arrived = self._at(rank, one.read).copy()
            if one.op is Op.ENCODE:
                arrived = self._encoded(rank, one.write, arrived)
            self._at(rank, one.write)[:] = arrived + (self._at(rank, one.write) if one.op is Op.MERGE else 0)
            self.done[rank][index] = True

    def _encoded(self, rank: int, write: Slice | None, values: Numbers) -> Numbers:
        assert write is not None
        residual = self.residuals[rank][write.start : write.stop]
        if len(residual) != len(values):  # a place that no element has; what is sent is wrong anyway
            return self.rng.integers(1, _LARGE, len(values))
        sent = values + residual - self.rng.integers(1, _LARGE, len(values))
        residual[:] += values - sent
        return sent

    def _carry(self, link: tuple[int, int]) -> bool:
        (source, target), (index, early), arrival = link, self.sent[link].pop(0), self.posted[link].pop(0)
        values = self._at(source, self.program.ranks[source][index].read) if early is None else early
        place = self._at(target, self.program.ranks[target][arrival].write)
        if len(values) != len(place):
            return False
        place[:] = values
        self.done[source][index] = self.done[target][arrival] = True
        return True

    def _at(self, rank: int, touched: Slice | None) -> Numbers:
        assert touched is not None
        return self.memories[rank][touched.buffer][touched.start : touched.stop]
