"""Selective compression and partitioning: compress each gradient or not, in how many parts (HiPress section 3.3).

Every gradient is decided by itself, by what its synchronisation would take: Eq. 1 without a codec, Eq. 2 with one, over
K = 1..N partitions. Both are convex in K where the curves are convex, as lines with a floor are: T(m/K) is a convex,
never decreasing function of the convex m/K, and K T(m/K) is T's perspective. So the first K after which the cost does
not fall any more is best, and bisection finds it.

What is not looked at is what else travels at the same time: a gradient that the backward pass hides is compressed too
where that is faster by itself. `joint` decides for the whole iteration.

Curves are of single calls and single messages: what the executor makes of a K (blocks, several messages under way,
ranks that share cores) is in a line measured as it runs. So for plans in training the curves only say which K are worth
a measurement (`partitions_to_measure`), and measured lines decide.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.cost.papers import sync_seconds
from penstock.cost.ways import Way
from penstock.curves import CodecCurves, Curve
from penstock.errors import PlanError
from penstock.network import Network
from penstock.plan import Bucket, Route, cut_into_buckets
from penstock.strategies import STRATEGIES
from penstock.strategies.closed_form import CountFunction
from penstock.strategies.strategy import Options
from penstock.trace import Trace


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do with a gradient."""

    compress: bool
    partitions: int
    seconds: float  # predicted, of synchronising it


def choose(counts: CountFunction, workers: int, nbytes: float, send: Curve, codec: CodecCurves) -> Choice:
    """Return the better of compressing and not, each with its best K up to the number of workers."""
    found = []
    for compress in (False, True):
        curves = codec if compress else None

        def seconds(k: int, curves: CodecCurves | None = curves) -> float:
            return sync_seconds(counts, workers, k, nbytes, send, curves)

        k = best_partitions(seconds, workers)
        found.append(Choice(compress, k, seconds(k)))
    return min(found, key=lambda choice: choice.seconds)  # on a tie, not compressing: it loses nothing


def best_partitions(seconds: Callable[[int], float], most: int) -> int:
    """Return the K in 1..most with the least `seconds(K)`, the smallest such; `seconds` must be convex."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if seconds(middle + 1) < seconds(middle):
            low = middle + 1
        else:
            high = middle
    return low


def plan_selective(trace: Trace, ways: Sequence[Way]) -> tuple[Bucket, ...]:
    """Give each tensor a bucket of its own, by the way that is fastest for a tensor of its size."""
    if not ways:
        raise PlanError("no way to send a bucket was given; wanted at least one")
    chosen = fastest_alone(trace, ways)
    return cut_into_buckets(trace, range(len(chosen)), [way.route for way in chosen])


def fastest_alone(trace: Trace, ways: Sequence[Way]) -> list[Way]:
    """Return each tensor's fastest way; of equally fast ones the first."""
    return [min(ways, key=lambda way: way.seconds(nbytes)) for nbytes in trace.nbytes]


FINER = 4  # pieces per rank: encoding one overlaps sending another


def partitions_to_measure(trace: Trace, network: Network, route: Route) -> tuple[int, ...]:
    """Return the numbers of pieces worth measuring `route` with, besides what its strategy does by itself.

    A plan says 1 for that, so that 1 is not among them; nor is one piece per rank, which it is. Beside what Eq. 2 finds
    best that is one K on either side of it: where the cost is convex and neither side is cheaper, nothing beyond is.
    """
    workers = network.workers
    wanted = {workers // 2, FINER * workers} | _best_of_each(trace, network, route)
    return tuple(sorted(k for k in wanted if k > 1 and k != workers)) if workers > 1 else ()


def counts_in_pieces(strategy: str) -> CountFunction | None:
    """Return the counts of a strategy that cuts tensors into a piece per rank, or into more; None for any other."""
    found = STRATEGIES.get(strategy)
    return found.counts if found is not None and found.cut(2, Options()).chunks > 1 else None


def _best_of_each(trace: Trace, network: Network, route: Route) -> set[int]:
    """Return what Eq. 2 finds best for some gradient that Eq. 1 does not rather leave dense."""
    curves, counts = network.codecs.get(str(route.codec)), counts_in_pieces(route.strategy)
    if curves is None or counts is None:
        return set()
    send = Curve(network.beta_seconds_per_byte, network.alpha_seconds)
    found = (choose(counts, network.workers, nbytes, send, curves) for nbytes in set(trace.nbytes))
    return {choice.partitions for choice in found if choice.compress}
