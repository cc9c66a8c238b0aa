"""Rules that make buckets without looking for the best: those of WFBP, SyncEASGD, stock DDP and MG-WFBP."""

from collections.abc import Sequence

from penstock.cost.ways import Way
from penstock.plan import Bucket, cut_into_buckets
from penstock.trace import Trace

FIRST_NBYTES = 1 << 20  # torch.distributed's first bucket
NEXT_NBYTES = 25 << 20  # its bucket_cap_mb=25


def plan_threshold(
    trace: Trace, ways: Sequence[Way], first_nbytes: int = FIRST_NBYTES, next_nbytes: int = NEXT_NBYTES
) -> tuple[Bucket, ...]:
    """Close a bucket as soon as it holds its limit: the first is small so that sending starts early.

    As in torch's `compute_bucket_assignment_by_size`, the tensor that reaches the limit still goes into the bucket.
    """
    ends: list[int] = []
    held, limit = 0, first_nbytes
    for index, nbytes in enumerate(trace.nbytes):
        held += nbytes
        if held >= limit or index == len(trace.tensors) - 1:
            ends.append(index)
            held, limit = 0, next_nbytes
    return cut_into_buckets(trace, ends, [ways[0].route] * len(ends))


def plan_single(trace: Trace, ways: Sequence[Way]) -> tuple[Bucket, ...]:
    """Put all tensors into one bucket: one startup, no overlap (SyncEASGD; MG-WFBP section 2.4)."""
    return cut_into_buckets(trace, [len(trace.tensors) - 1], [ways[0].route])


def plan_wfbp(trace: Trace, ways: Sequence[Way]) -> tuple[Bucket, ...]:
    """Put each tensor into its own bucket: the most overlap, one startup per tensor (WFBP; MG-WFBP section 2.3)."""
    count = len(trace.tensors)
    return cut_into_buckets(trace, range(count), [ways[0].route] * count)


def plan_greedy(trace: Trace, ways: Sequence[Way]) -> tuple[Bucket, ...]:
    """Apply MG-WFBP's Algorithm 1 as published, in linear time. It is not optimal (erratum 1); `exact` is.

    The rule (Eq. 38): merge a tensor into the next one if the next one is ready less than a startup after this one
    could begin to be sent. It looks one tensor ahead, so a run of short gaps merges everything.

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
