"""Wait-free backpropagation: every tensor is a message of its own (MG-WFBP section 2.3)."""

from collections.abc import Sequence

from penstock.cost.ways import Way
from penstock.plan import Bucket, cut_into_buckets
from penstock.trace import Trace


def plan_wfbp(trace: Trace, ways: Sequence[Way]) -> tuple[Bucket, ...]:
    """Put each tensor into its own bucket: the most overlap, and one startup per tensor."""
    count = len(trace.tensors)
    return cut_into_buckets(trace, range(count), [ways[0].route] * count)
