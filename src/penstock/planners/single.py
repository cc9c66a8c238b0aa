"""Single-layer communication, SyncEASGD: one message with every gradient (MG-WFBP section 2.4)."""

from collections.abc import Sequence

from penstock.cost.ways import Way
from penstock.plan import Bucket, cut_into_buckets
from penstock.trace import Trace


def plan_single(trace: Trace, ways: Sequence[Way]) -> tuple[Bucket, ...]:
    """Put all tensors into one bucket: one startup, and no overlap at all."""
    return cut_into_buckets(trace, [len(trace.tensors) - 1], [ways[0].route])
