"""The optimal merging where every message passes two stages: push and pull of parameter servers, codec and network.

In ready order, a schedule of tensors 1..i ends at a pair of times (F, G), when the first and the second stage are free.
A message i+1..j of a way with lines (a, b) and (c, d) leads from there to

    F' = max(F, r_j) + a + b (S_j - S_i),     G' = max(G, F') + c + d (S_j - S_i).

All pairs that no other one beats in both times are kept: later times never decrease in either, so nothing is lost. What
makes that affordable is that a pair of a *later* prefix beats one of an earlier prefix for good, whatever follows. Let
r be the next ready time, E = max(F, r), H = max(G, E + a), with the least a, b and d of all ways. If i' >= i,
E' - b S_i' <= E - b S_i and H' - d S_i' <= H - d S_i, then every message that could begin at i can begin at i' with
fewer bytes and is no later in either stage. Of 161 tensors of ResNet-50 some hundreds of pairs stay under way.

Where they are too many (`MOST_STATES`), neighbouring tensors are glued into at most about 4 n grains (n of `GRAINS`),
none spanning more than 1/n of the backward pass or of the bytes unless it is one tensor. Moving each cut of an optimal
schedule up to the end of its grain delays a message's last gradient by a grain's span and adds a grain's bytes to what
the first stage carries, to nothing else: the result is at most (backward + b S) / n behind the optimum.

**Coupled stages.** Coded messages that are queued on a GPU (`runtime/device/queued.py`) have two rounds: with bucket k,
one group of messages carries its first round and the second round of bucket k - 1; the last second round goes alone.
Of ways with more rounds, as gTop-k's, all later ones are the second here (`cost/ways.py`).

    ready:         b1        b2             b3
    wire:          |1a       |1b 2a         |2b 3a|3b|

Let F(i, j) be the earliest time at which the wire is free after the first round of a bucket i+1..j, whose predecessor
is h+1..i. A group starts up once, so

    F(i, j) = min over h < i of  max(F(h, i), r_j) + a + b (S_j - S_i) + d (S_i - S_h)
    end     = min over i of  F(i, n) + c + d (S_n - S_i)

F never decreases in F(h, i): the recurrence is exact. It is kept apart by the number of messages, as every message
costs the host and the device time that is in no line: `CoupledCuts` has the best cuts of each number.

Payloads of a bucket take memory on the device. So several tensors are not put together beyond `Way.most_nbytes`, unless
that makes the iteration clearly longer.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.cost.ways import Way

MOST, COUPLED_GRAINS, MOST_MESSAGES = 200, 48, 24  # coupled: tensors that are not glued, else grains; messages
APART = 0.02  # of the end: by how much smaller buckets may delay it to save memory
MOST_STATES = 200_000  # pairs looked at before tensors are glued: some tenths of a second
GRAINS = (128, 48)  # the second where the first has too many pairs too
_Floats = NDArray[np.float64]
_Cuts = list[tuple[int, int]]


def optimal_staged_cuts(ready: Sequence[float], prefix: Sequence[int], ways: Sequence[Way]) -> _Cuts:
    """Return (index of the last tensor, index of the way) for each message; `prefix` are the bytes of the first j."""
    assert {len(way.stages) for way in ways} == {2}  # `comparable` has made them so
    fine, coarse = (grain_ends(ready, prefix, grains) for grains in GRAINS)
    for ends in (range(1, len(ready) + 1), fine):
        cuts = _Search(ready, prefix, ends, ways).run(MOST_STATES)
        if cuts is not None:
            return cuts
    cuts = _Search(ready, prefix, coarse, ways).run(None)
    assert cuts is not None
    return cuts


def grain_ends(ready: Sequence[float], prefix: Sequence[int], grains: int) -> list[int]:
    """Return how many tensors lie before the end of each grain."""
    span, nbytes = (ready[-1] - ready[0]) / grains, prefix[-1] / grains
    ends: list[int] = []
    start = 0
    for j in range(1, len(ready)):
        if ready[j] - ready[start] > span or prefix[j + 1] - prefix[start] > nbytes:
            ends.append(j)
            start = j
    return [*ends, len(ready)]


class _Search:
    """The pairs under way, as columns, and every pair ever kept with where it came from."""

    def __init__(self, ready: Sequence[float], prefix: Sequence[int], ends: Sequence[int], ways: Sequence[Way]) -> None:
        self._ready = [ready[end - 1] for end in ends]
        self._ends = ends
        self._nbytes = [float(prefix[end]) for end in ends]
        self._ways = ways
        lines = [way.stages for way in ways]
        self._least_startup = min(first.a_seconds for first, _ in lines)
        self._least_slopes = [min(pair[i].b_seconds_per_byte for pair in lines) for i in (0, 1)]
        self._least_each = min(way.seconds_per_tensor for way in ways)
        # rows: free times of both stages, bytes and tensors before, number in the history
        self._pairs: _Floats = np.zeros((5, 1))
        self._history: list[tuple[int, int, int]] = [(-1, 0, 0)]  # (pair before, tensors, way)

    def run(self, most: int | None) -> _Cuts | None:
        """Return the optimal cuts; None if more than `most` pairs had to be looked at."""
        looked_at, ended = 0, np.zeros(1)
        for step in range(len(self._ends)):
            looked_at += self._pairs.shape[1] * len(self._ways)
            if most is not None and looked_at > most:
                return None
            ended = self._extend(step)
            if step + 1 < len(self._ends):
                self._drop_beaten(self._ready[step + 1])
        return self._walk_back(len(self._history) - len(ended) + int(ended.argmin()))

    def _extend(self, step: int) -> _Floats:
        """Add the pairs at the end of grain `step`; return when the second stage is free in each."""
        first, second = np.hstack([self._messages(step, way) for way in self._ways])
        order = np.lexsort((second, first))
        least = np.minimum.accumulate(second[order])
        kept = order[np.concatenate([[True], second[order][1:] < least[:-1]])]
        way, pair = np.divmod(kept, self._pairs.shape[1])
        came_from, end, known = self._pairs[4][pair], self._ends[step], len(self._history)
        self._history += [(int(one), end, int(chosen)) for one, chosen in zip(came_from, way, strict=True)]
        before, numbers = np.full((2, len(kept)), [[self._nbytes[step]], [end]]), np.arange(known, len(self._history))
        self._pairs = np.hstack([self._pairs, np.vstack([first[kept], second[kept], before, numbers])])
        return np.asarray(second[kept])

    def _messages(self, step: int, way: Way) -> _Floats:
        """Return where a message from each pair under way to the end of grain `step` leads: both stages' times."""
        push, pull = way.stages
        free, free_second, before, count, _ = self._pairs
        nbytes = self._nbytes[step] - before
        calls = way.seconds_per_tensor * (self._ends[step] - count)
        first = np.maximum(free, self._ready[step]) + push.a_seconds + push.b_seconds_per_byte * nbytes + calls
        return np.vstack([first, np.maximum(free_second, first) + pull.a_seconds + pull.b_seconds_per_byte * nbytes])

    def _drop_beaten(self, ready: float) -> None:
        """Drop pairs that one of a later prefix beats for good; `ready` is when the next grain is."""
        free, free_second, before, count, _ = self._pairs
        first = np.maximum(free, ready)
        second = np.maximum(free_second, first + self._least_startup)
        push, pull = self._least_slopes
        early = first - push * before - self._least_each * count
        late = second - pull * before
        self._pairs = self._pairs[:, _staircase(early, late, np.lexsort((late, early, -count)))]

    def _walk_back(self, number: int) -> _Cuts:
        cuts: _Cuts = []
        while number > 0:
            number, end, way = self._history[number]
            cuts.append((end - 1, way))
        return cuts[::-1]


class CoupledCuts:
    """The best cuts by one coupled way, for each number of messages."""

    def __init__(self, ready: Sequence[float], prefix: Sequence[int], way: Way) -> None:
        ends = range(1, len(ready) + 1) if len(ready) <= MOST else grain_ends(ready, prefix, COUPLED_GRAINS)
        edges = [0, *ends]  # where messages may begin and end, in tensors
        self._edges, self._ready = edges, np.array([0.0, *(ready[edge - 1] for edge in edges[1:])])
        nbytes, tensors = (np.array(each, dtype=float) for each in ([prefix[edge] for edge in edges], edges))
        sizes, counts = (np.maximum(0.0, each[None, :] - each[:, None]) for each in (nbytes, tensors))
        own, self._left = way.coupled_seconds(sizes, counts)  # of a bucket between two edges
        self._last_startup = way.stages[1].a_seconds
        self._find(own)
        earliest = min(self.seconds)
        if (too_large := (sizes > way.most_nbytes) & (counts > 1)).any():
            self._find(np.where(too_large, np.inf, own))
            if min(self.seconds) > (1 + APART) * earliest:  # as where it takes more messages than are tried
                self._find(own)

    def _find(self, own: _Floats) -> None:
        size = len(self._edges)
        free = np.full((size, size), np.inf)  # F(i, j)
        free[0, 1:] = self._ready[1:] + own[0, 1:]
        self._before: list[NDArray[np.int64]] = [np.zeros((size, size), dtype=np.int64)]
        finishes = [self._finish(free)]
        for _ in range(min(size - 1, MOST_MESSAGES) - 1):
            free, chosen = self._one_more(free, own)
            self._before.append(chosen)
            finishes.append(self._finish(free))
        self.seconds = [end for end, _ in finishes]  # when all has travelled at the earliest, with 1, 2, ... messages
        self._starts = [start for _, start in finishes]

    def fewest(self, tie: float) -> int:
        """Return the fewest messages that end at most `tie` of the earliest end after it."""
        return 1 + next(number for number, end in enumerate(self.seconds) if end <= (1 + tie) * min(self.seconds))

    def ends(self, count: int) -> list[int]:
        """Return the index of the last tensor of each of `count` messages."""
        start, end, found = self._starts[count - 1], len(self._edges) - 1, list[int]()
        for chosen in reversed(self._before[:count]):
            found.append(self._edges[end] - 1)
            start, end = int(chosen[start, end]), start
        return found[::-1]

    def _finish(self, free: _Floats) -> tuple[float, int]:
        """Return when all has travelled at the earliest, and where the last message begins."""
        ends = free[:-1, -1] + self._last_startup + self._left[:-1, -1]
        return float(ends.min()), int(ends.argmin())

    def _one_more(self, free: _Floats, own: _Floats) -> tuple[_Floats, NDArray[np.int64]]:
        """Return F with one more message, and where the message before each last one begins."""
        size = len(self._edges)
        more, chosen = np.full((size, size), np.inf), np.zeros((size, size), dtype=np.int64)
        for i in range(1, size - 1):
            starts = np.maximum(free[:i, i, None], self._ready[None, i + 1 :]) + self._left[:i, i, None]
            chosen[i, i + 1 :] = starts.argmin(axis=0)
            more[i, i + 1 :] = starts.min(axis=0) + own[i, i + 1 :]
        return more, chosen


def _staircase(x: _Floats, y: _Floats, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, in rising order, the points that none before them in `order` is at or below in both coordinates."""
    xs: list[float] = []  # rising; the corresponding ys fall
    ys: list[float] = []
    kept: list[int] = []
    for index, across, up in zip(order.tolist(), x[order].tolist(), y[order].tolist(), strict=True):
        at = bisect_right(xs, across)
        if at and ys[at - 1] <= up:
            continue
        after = at
        while after < len(ys) and ys[after] >= up:
            after += 1
        xs[at:after], ys[at:after] = [across], [up]
        kept.append(index)
    return np.sort(np.array(kept, dtype=np.int64))
