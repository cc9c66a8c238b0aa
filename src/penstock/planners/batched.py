"""Selective compression, then batching: neighbours that chose the same way travel together where that is earlier.

HiPress's order is partition, compress, batch. `selective` does the first two for each gradient by itself; messages of
one gradient each pay a startup each, so a coordinator batches them afterwards. In the order in which gradients become
ready, let a *run* be neighbours with the same way. Messages hold consecutive gradients of one run, and with s the first
of the run that holds j,

    f_j = min over s <= i < j of  max(f_i, r_j) + a + b (S_j - S_i) + c (j - i),     f_0 = 0,

the recurrence of `exact` with fewer i and the way already chosen. It is the best batching of these decisions, so never
slower than one message each; with one way for all it is the optimum of that way.

    dense dense onebit onebit dense:   three runs; the first may be sent as d|d or dd, never together with a onebit
"""

from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise

from penstock.cost.ways import Way, comparable
from penstock.errors import PlanError
from penstock.plan import Bucket, cut_into_buckets
from penstock.planners.selective import fastest_alone
from penstock.trace import Trace


def plan_batched(trace: Trace, ways: Sequence[Way]) -> tuple[Bucket, ...]:
    """Give each tensor the way that is fastest for it alone, and batch neighbours that agree."""
    if not ways:
        raise PlanError("no way to send a bucket was given; wanted at least one")
    chosen = fastest_alone(trace, [way.one_stage() for way in comparable(ways)])
    ends = _ends(trace, chosen)
    return cut_into_buckets(trace, ends, [chosen[end].route for end in ends])


def _ends(trace: Trace, chosen: Sequence[Way]) -> list[int]:
    """Return the index of the last tensor of each message; of equally early batchings the one with larger messages."""
    prefix, ready = list(accumulate(trace.nbytes, initial=0)), trace.ready_seconds
    finish, begins = [0.0], [0]  # of the first j tensors, and where their last message begins
    for start, stop in _runs(chosen):
        way = chosen[start]
        spent = [way.whole.b_seconds_per_byte * n + way.seconds_per_tensor * j for j, n in enumerate(prefix)]
        for j in range(start + 1, stop + 1):
            now = ready[j - 1]
            earliest, begin = min((max(finish[i], now) - spent[i], i) for i in range(start, j))
            finish.append(earliest + way.whole.a_seconds + spent[j])
            begins.append(begin)
    ends, j = [], len(chosen)
    while j > 0:
        ends.append(j - 1)
        j = begins[j]
    return ends[::-1]


def _runs(chosen: Sequence[Way]) -> list[tuple[int, int]]:
    """Return (first, one past the last) of each run of neighbours with the same way."""
    lengths = [len(list(group)) for _, group in groupby(way.route for way in chosen)]
    bounds = list(accumulate(lengths, initial=0))
    return list(pairwise(bounds))
