"""Selective compression, then batching: neighbours that chose the same way travel together where that is earlier.

HiPress's order is partition, compress, batch. `selective` does the first two for each gradient by itself; messages of
one gradient each pay a startup each, so a coordinator batches them afterwards. In the order in which gradients become
ready, let a *run* be neighbours with the same way. Messages hold consecutive gradients of one run, and with s the first
of the run that holds j,

    f_j = min over s <= i < j of  max(f_i, r_j) + a + b (S_j - S_i) + c (j - i),     f_0 = 0,

the recurrence of `exact` with fewer i and the way already chosen. It is the best batching of these decisions, so never
slower than one message each; with one way for all it is the optimum of that way.

    dense dense onebit onebit dense:   three runs; the first may be sent as d|d or dd, never together with a onebit

The same with buckets in the place of gradients, which some planner has cut: `best_bulks` are its bulks.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from penstock.cost.ways import Way, comparable
from penstock.errors import PlanError
from penstock.plan import Bucket, Plan, cut_into_buckets
from penstock.planners.exact import ROUNDING, earliest_start
from penstock.planners.selective import fastest_alone
from penstock.trace import Trace


def plan_batched(trace: Trace, ways: Sequence[Way]) -> tuple[Bucket, ...]:
    """Give each tensor the way that is fastest for it alone, and batch neighbours that agree."""
    if not ways:
        raise PlanError("no way to send a bucket was given; wanted at least one")
    chosen = fastest_alone(trace, [way.one_stage() for way in comparable(ways)])
    ends = _ends(trace.ready_seconds, trace.nbytes, [1] * len(chosen), chosen)
    return cut_into_buckets(trace, ends, [chosen[end].route for end in ends])


def in_bulks(plan: Plan, trace: Trace, ways: Sequence[Way]) -> Plan:
    """Return a plan with its best bulks; as it is where no two buckets are to travel together."""
    bulks = best_bulks(plan, trace, ways)
    return replace(plan, bulks=bulks) if max(bulks) > 1 else plan


def best_bulks(plan: Plan, trace: Trace, ways: Sequence[Way]) -> tuple[int, ...]:
    """Return how many of a plan's buckets in a row are to travel as one message, each by its own route."""
    by_route = {way.route: way.one_stage() for way in ways}
    index_of = {tensor.name: index for index, tensor in enumerate(trace.tensors)}
    last = [max(index_of[name] for name in bucket.tensors) if plan.overlap else -1 for bucket in plan.buckets]
    moments = trace.ready_seconds
    ready = list(accumulate((moments[each] for each in last), max))  # messages keep the order of buckets
    ends = _ends(
        ready,
        [bucket.nbytes for bucket in plan.buckets],
        [len(bucket.tensors) for bucket in plan.buckets],
        [by_route[bucket.route] for bucket in plan.buckets],
    )
    return tuple(end - start for start, end in pairwise([-1, *ends]))


def _ends(ready: Sequence[float], nbytes: Sequence[int], counts: Sequence[int], chosen: Sequence[Way]) -> list[int]:
    """Return the index of the last tensor of each message of the earliest batching; of those, one with few messages.

    A tensor here may be several that travel together anyway: `counts` says how many.

    As in `exact`: what is hidden costs nothing, so that walking back from the end each message takes in as many earlier
    tensors of its run as it can without delaying what follows. Linear in tensors: of the starts whose prefix has been
    sent when gradient j is ready the last is best, and of all later ones the first, since f_i - b S_i never decreases
    inside a run (taking a gradient out of a schedule ends it at least its transfer time earlier).
    """
    starts, ways = _run_starts(chosen), {way.route: way for way in chosen}
    by_route = {route: _spent(nbytes, counts, way) for route, way in ways.items()}
    spent, startup = [by_route[way.route] for way in chosen], [way.whole.a_seconds for way in chosen]
    finish, begins = [0.0], [0]  # of the first j tensors, and where the last message of an earliest batching begins

    def ends_seconds(i: int, j: int) -> float:
        return max(finish[i], ready[j - 1]) + startup[j - 1] + (spent[j - 1][j] - spent[j - 1][i])

    waited = 0  # the last i whose prefix has been sent when the current gradient is ready
    for j in range(1, len(chosen) + 1):
        while waited + 1 < j and finish[waited + 1] <= ready[j - 1]:
            waited += 1
        found = (i for i in (waited, waited + 1, starts[j - 1]) if starts[j - 1] <= i < j)
        earliest, begin = min((ends_seconds(i, j), i) for i in found)
        finish.append(earliest)
        begins.append(begin)
    ends, j, deadline = [], len(chosen), finish[-1]
    while j > 0:
        taken = spent[j - 1]
        left = deadline - ready[j - 1] - startup[j - 1]
        begin = max(starts[j - 1], earliest_start(taken, j, left))
        if begin >= j or ends_seconds(begin, j) > deadline * (1 + ROUNDING):
            begin = begins[j]
        ends.append(j - 1)
        deadline -= startup[j - 1] + (taken[j] - taken[begin])
        j = begin
    return ends[::-1]


def _spent(nbytes: Sequence[int], counts: Sequence[int], way: Way) -> list[float]:
    """Return what the first j tensors take by a way, startups left out."""
    bytes_before, tensors_before = (accumulate(each, initial=0) for each in (nbytes, counts))
    b, each = way.whole.b_seconds_per_byte, way.seconds_per_tensor
    return [b * size + each * count for size, count in zip(bytes_before, tensors_before, strict=True)]


def _run_starts(chosen: Sequence[Way]) -> list[int]:
    """Return for each tensor the first of its run."""
    starts: list[int] = []
    for index, way in enumerate(chosen):
        goes_on = index > 0 and way.route == chosen[index - 1].route
        starts.append(starts[-1] if goes_on else index)
    return starts
