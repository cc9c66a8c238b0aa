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
from itertools import accumulate

from penstock.cost.ways import Way, comparable
from penstock.errors import PlanError
from penstock.plan import Bucket, cut_into_buckets
from penstock.planners.exact import ROUNDING
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
    """Return the index of the last tensor of each message of the earliest batching; of those, one with few messages.

    As in `exact`: what is hidden costs nothing, so that walking back from the end each message takes in as many earlier
    tensors of its run as it can without delaying what follows.
    """
    ready, starts = trace.ready_seconds, _run_starts(chosen)
    by_route = {way.route: _spent(trace, way) for way in chosen}
    spent, startup = [by_route[way.route] for way in chosen], [way.whole.a_seconds for way in chosen]
    finish, begins = [0.0], [0]  # of the first j tensors, and where the last message of an earliest batching begins

    def message_seconds(i: int, j: int) -> float:
        return startup[j - 1] + (spent[j - 1][j] - spent[j - 1][i])

    for j in range(1, len(chosen) + 1):
        found = ((max(finish[i], ready[j - 1]) + message_seconds(i, j), i) for i in range(starts[j - 1], j))
        earliest, begin = min(found)
        finish.append(earliest)
        begins.append(begin)
    ends, j, deadline = [], len(chosen), finish[-1]
    while j > 0:
        late = deadline * (1 + ROUNDING)
        in_time = (i for i in range(starts[j - 1], j) if max(finish[i], ready[j - 1]) + message_seconds(i, j) <= late)
        begin = next(in_time, begins[j])
        ends.append(j - 1)
        deadline -= message_seconds(begin, j)
        j = begin
    return ends[::-1]


def _spent(trace: Trace, way: Way) -> list[float]:
    """Return what the first j tensors take by a way, startups left out."""
    prefix = accumulate(trace.nbytes, initial=0)
    line = way.whole
    return [line.b_seconds_per_byte * nbytes + way.seconds_per_tensor * j for j, nbytes in enumerate(prefix)]


def _run_starts(chosen: Sequence[Way]) -> list[int]:
    """Return for each tensor the first of its run."""
    starts: list[int] = []
    for index, way in enumerate(chosen):
        goes_on = index > 0 and way.route == chosen[index - 1].route
        starts.append(starts[-1] if goes_on else index)
    return starts
