"""All choices at once: merge boundaries x strategy x codec x partitions, for the whole iteration.

Every combination of strategy, codec and number of partitions is one way with a line of its own (`cost.ways`), and the
dynamic programme of `exact` takes any number of ways. It is exact: no schedule of consecutive buckets ends earlier,
whatever the way of each bucket, so no single choice of strategy, codec and partitions does either. A compressed bucket
whose cost depends on its tensors one by one is still separable; see `exact`.
"""

from collections.abc import Sequence

from penstock.cost.ways import Way, comparable
from penstock.errors import PlanError
from penstock.plan import Bucket
from penstock.planners.exact import plan_exact
from penstock.trace import Trace


def plan_joint(trace: Trace, ways: Sequence[Way]) -> tuple[Bucket, ...]:
    """Return the buckets, and the way of each, that end the iteration earliest."""
    if not ways:
        raise PlanError("no way to send a bucket was given; wanted at least one")
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
