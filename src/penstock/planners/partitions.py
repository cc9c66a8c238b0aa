"""Into how many pieces tensors may be worth cutting: HiPress's K, found from curves before anything is measured.

Eq. 2 with the codec's and the network's measured curves is convex in K, so bisection finds each gradient's best K
(`selective.choose`). Those curves are of single calls and single messages: what the executor makes of a K (blocks,
several messages under way, ranks that share cores) is in a line measured as it runs. So the curves say which K are
worth a measurement, and measured lines decide. Beside Eq. 2's own choices that is one K on either side of what a
strategy cuts by itself, one piece per rank: where the cost is convex and neither side is cheaper, nothing beyond is.
"""

from penstock.curves import Curve
from penstock.network import Network
from penstock.plan import Route
from penstock.planners.selective import choose
from penstock.strategies import STRATEGIES
from penstock.strategies.closed_form import CountFunction
from penstock.strategies.strategy import Options
from penstock.trace import Trace

FINER = 4  # pieces per rank: encoding one overlaps sending another


def partitions_to_measure(trace: Trace, network: Network, route: Route) -> tuple[int, ...]:
    """Return the numbers of pieces worth measuring `route` with, besides what its strategy does by itself.

    A plan says 1 for that, so that 1 is not among them; nor is one piece per rank, which it is.
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
