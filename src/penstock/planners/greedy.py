"""MG-WFBP's Algorithm 1, as published. It is not optimal (erratum 1); `exact` is.

The rule (Eq. 38): merge a tensor into the next one if the next one is ready less than a startup after this one could
begin to be sent. It looks one tensor ahead, so a run of short gaps merges everything.
"""

from collections.abc import Sequence

from penstock.cost.ways import Way
from penstock.plan import Bucket, cut_into_buckets
from penstock.trace import Trace


def plan_greedy(trace: Trace, ways: Sequence[Way]) -> tuple[Bucket, ...]:
    """Apply Algorithm 1 in linear time.

    The published text recomputes every start time after each merge. The decision about a tensor depends only on
    tensors that are ready before it, and those are settled, so one pass that carries the start time along takes the
    same decisions on the same numbers.
    """
    cost = ways[0].whole
    ready, sizes = trace.ready_seconds, trace.nbytes
    ends: list[int] = []
    start, pending = ready[0], 0  # when the open bucket can begin to be sent, and its bytes
    for index in range(len(sizes) - 1):
        pending += sizes[index]
        if ready[index + 1] - start < cost.a_seconds:
            start = max(start, ready[index + 1])
        else:
            ends.append(index)
            start, pending = max(start + cost.seconds(pending), ready[index + 1]), 0
    ends.append(len(sizes) - 1)
    return cut_into_buckets(trace, ends, [ways[0].route] * len(ends))
