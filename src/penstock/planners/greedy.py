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


def greedy_ends_as_published(ready: Sequence[float], sizes: Sequence[int], a: float, b: float) -> list[int]:
    """Transcribe Algorithm 1 line by line, quadratic as printed; return the index of each bucket's last tensor.

    The paper counts layers from the input, L first to be ready; here index 0 is ready first, so its l-1 is our i+1.
    `ready[i]` is its tau_b[l] + t_b[l].
    """
    count = len(sizes)
    p = list(sizes)
    comm = [a + b * size for size in sizes]  # lines 4-5
    merged = [False] * count
    start = _calculate_comm_start(comm, ready)  # line 9
    for i in range(count - 1):  # line 10
        if ready[i + 1] - start[i] < a:  # line 11
            comm[i] = 0.0  # MERGE, lines 16-19
            p[i + 1] += p[i]
            comm[i + 1] = a + b * p[i + 1]
            start = _calculate_comm_start(comm, ready)  # line 13
            merged[i] = True  # line 14
    return [i for i in range(count) if not merged[i]]


def _calculate_comm_start(comm: Sequence[float], ready: Sequence[float]) -> list[float]:
    start = [ready[0]]  # line 22
    for i in range(1, len(ready)):  # lines 23-24
        start.append(max(start[i - 1] + comm[i - 1], ready[i]))
    return start
