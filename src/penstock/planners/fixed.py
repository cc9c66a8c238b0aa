"""Buckets that do not depend on the network: one per tensor, one for all, or of fixed sizes as stock DDP makes them."""

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
