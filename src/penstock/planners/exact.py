"""The optimal merging of gradients, in time linear in tensors x ways (one stage), proved in docs/decisions.

In ready order, let r_j be when gradient j is ready, S_j the bytes of gradients 1..j, and f_j the earliest time at which
1..j can all have been sent. The last message of an optimal schedule of 1..j holds some i+1..j, so

    f_j = min over i < j and ways (a, b) of  max(f_i, r_j) + a + b (S_j - S_i),     f_0 = 0.

f and r never decrease. Hence the candidates i split into those with f_i <= r_j, among which the last is best (it sends
the fewest bytes after r_j), and the rest, a window whose left end only moves right, where the least f_i - b S_i wins: a
monotone queue per way holds it. Each index enters and leaves each queue once.

    r = 1 2 3, one byte each, a = 2, b = 0.1:   f_1 = 1+2+0.1 = 3.1
    j=2: alone after 1: 3.1+2.1 = 5.2; with 1: 2+2.2 = 4.2          f_2 = 4.2
    j=3: alone after 2: 4.2+2.1 = 6.3; with 2: 3.1+2.2; all: 3+2.3   f_3 = 5.3

Many schedules end at the same best time, because what is hidden costs nothing. Walking back from the end, each message
takes in as many earlier gradients as it can without delaying what follows: with one way that gives the fewest messages.

Where every tensor has a price of its own besides its bytes (a codec compresses each by itself), b S_j becomes
b S_j + c j throughout. All that the argument needs is that it never decreases.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.cost.ways import Way, comparable
from penstock.errors import PlanError
from penstock.plan import Bucket, cut_into_buckets
from penstock.planners.staged import CoupledCuts, optimal_staged_cuts
from penstock.trace import Trace

COUPLED_TIE = 0.01  # of the iteration: coupled messages that save less are left out
ROUNDING = 1e-12  # a message counts as in time within this relative error of float arithmetic


def plan_exact(trace: Trace, ways: Sequence[Way]) -> tuple[Bucket, ...]:
    """Return the buckets, and the way of each, that end the iteration earliest: all choices at once.

    Every combination of strategy, codec and number of partitions is one way with a line of its own (`cost.ways`), and
    the dynamic programme takes any number of ways. It is exact: no schedule of consecutive buckets ends earlier,
    whatever the way of each, so no single choice does either. Ways of one and of two stages are mixed as `comparable`
    says: the two stages one after the other. Coupled ways are not mixed with others: of the best plans by each, and by
    all others together, the earliest is taken.
    """
    if not ways:
        raise PlanError("no way to send a bucket was given; wanted at least one")
    ways = comparable(ways)
    prefix = list(accumulate(trace.nbytes, initial=0))
    if any(way.coupled for way in ways):
        return _best_apart(trace, prefix, ways)
    if all(len(way.stages) == 1 for way in ways):
        cuts = optimal_cuts(trace.ready_seconds, [_price(way, prefix) for way in ways])
    else:
        cuts = optimal_staged_cuts(trace.ready_seconds, prefix, ways)
    return cut_into_buckets(trace, [end for end, _ in cuts], [ways[chosen].route for _, chosen in cuts])


def _best_apart(trace: Trace, prefix: Sequence[int], ways: Sequence[Way]) -> tuple[Bucket, ...]:
    """Return the best plan by one coupled way, or by those that are not."""
    found = list[tuple[float, tuple[Bucket, ...]]]()
    for way in (each for each in ways if each.coupled):
        cuts = CoupledCuts(trace.ready_seconds, prefix, way)
        count = cuts.fewest(COUPLED_TIE)
        ends = cuts.ends(count)
        found.append((cuts.seconds[count - 1], cut_into_buckets(trace, ends, [way.route] * len(ends))))
    if others := [way.one_stage() for way in ways if not way.coupled]:
        prices = [_price(way, prefix) for way in others]
        chosen = optimal_cuts(trace.ready_seconds, prices)
        buckets = cut_into_buckets(trace, [end for end, _ in chosen], [others[way].route for _, way in chosen])
        found.append((_end_seconds(trace.ready_seconds, prices, chosen), buckets))
    return min(found, key=lambda each: each[0])[1]


def _end_seconds(ready: Sequence[float], prices: Sequence["Price"], cuts: Sequence[tuple[int, int]]) -> float:
    """Return when the last of some messages has been sent."""
    finish, start = 0.0, 0
    for last, way in cuts:
        price = prices[way]
        finish = max(finish, ready[last]) + price.startup + price.spent[last + 1] - price.spent[start]
        start = last + 1
    return finish


@dataclass(frozen=True, slots=True)
class Price:
    """What messages cost by one way: tensors i+1..j take `startup + spent[j] - spent[i]` seconds."""

    startup: float
    spent: Sequence[float]  # by the first j tensors, startups left out; never decreases


def _price(way: Way, prefix: Sequence[int]) -> Price:
    line, each = way.stages[0], way.seconds_per_tensor
    b = line.b_seconds_per_byte
    spent = [b * nbytes + each * count for count, nbytes in enumerate(prefix)] if each else [b * n for n in prefix]
    return Price(line.a_seconds, spent)


def optimal_cuts(ready: Sequence[float], prices: Sequence[Price]) -> list[tuple[int, int]]:
    """Return (index of the last tensor, index of the way) for each message of an optimal schedule."""
    lines = [(price.startup, price.spent, deque[int]()) for price in prices]
    finish = [0.0]
    cut = [(0, 0)]  # where the last message of an optimal schedule of 1..j begins, and its way
    waited = 0  # the last i with finish[i] <= ready of the current tensor
    for j, ready_j in enumerate(ready, start=1):
        while waited + 1 < j and finish[waited + 1] <= ready_j:
            waited += 1
        best, choice = float("inf"), (0, 0)
        for way, (a, spent, queue) in enumerate(lines):
            while queue and queue[0] <= waited:
                queue.popleft()
            ends = ready_j + a + (spent[j] - spent[waited])
            if ends < best:
                best, choice = ends, (waited, way)
            if queue:
                ends = finish[queue[0]] + a + (spent[j] - spent[queue[0]])
                if ends < best:
                    best, choice = ends, (queue[0], way)
        finish.append(best)
        cut.append(choice)
        for _, spent, queue in lines:
            level = best - spent[j]
            while queue and finish[queue[-1]] - spent[queue[-1]] > level:
                queue.pop()
            queue.append(j)
    return _fewest_messages(finish, cut, ready, prices)


def _fewest_messages(
    finish: Sequence[float], cut: Sequence[tuple[int, int]], ready: Sequence[float], prices: Sequence[Price]
) -> list[tuple[int, int]]:
    """Walk back from the end; every message begins as early as still lets the next one meet its deadline."""
    messages: list[tuple[int, int]] = []
    j, deadline = len(ready), finish[-1]
    while j > 0:
        start, way = cut[j]
        late = deadline * (1 + ROUNDING)
        for other, price in enumerate(prices):
            spent = price.spent
            earlier = earliest_start(spent, j, deadline - ready[j - 1] - price.startup)
            if earlier < start:
                ends = max(finish[earlier], ready[j - 1]) + price.startup + (spent[j] - spent[earlier])
                start, way = (earlier, other) if ends <= late else (start, way)
        messages.append((j - 1, way))
        deadline -= prices[way].startup + (prices[way].spent[j] - prices[way].spent[start])
        j = start
    return messages[::-1]


def earliest_start(spent: Sequence[float], j: int, seconds: float) -> int:
    """Return the first i such that i+1..j can be sent in `seconds`; j where nothing can."""
    return j if seconds < 0 else bisect_left(spent, spent[j] - seconds, 0, j)


def plan_joint(trace: Trace, ways: Sequence[Way]) -> tuple[Bucket, ...]:
    """Return what `plan_exact` does, without ways that are never best."""
    if any(way.coupled for way in ways):
        return plan_exact(trace, ways)
    return plan_exact(trace, undominated(comparable(ways)))


def undominated(ways: Sequence[Way]) -> list[Way]:
    """Return the ways that no other beats for every bucket; of equal ones the first.

    Planning takes time in proportion to the ways, and of all combinations few are ever best.
    """
    kept: list[Way] = []
    for index, way in enumerate(ways):
        others = [*kept, *ways[index + 1 :]]
        if not any(_beats(other, way, earlier=other in kept) for other in others):
            kept.append(way)
    return kept


def _beats(one: Way, other: Way, earlier: bool) -> bool:
    """Say whether `one` is never slower than `other`; of equal ways the earlier one wins."""
    mine, theirs = _prices(one), _prices(other)
    return all(a <= b for a, b in zip(mine, theirs, strict=True)) and (earlier or mine != theirs)


def _prices(way: Way) -> tuple[float, ...]:
    lines = (price for stage in way.stages for price in (stage.a_seconds, stage.b_seconds_per_byte))
    return way.seconds_per_tensor, *lines
