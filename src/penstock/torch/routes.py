"""Which routes to measure, and so to choose from: first ones that every plan may want, then more of what looks best.

Measuring a compressed all-reduce takes seconds, so not every codec is measured by every strategy in every
number of pieces. What curves and first lines suggest is measured as it runs before a plan may use it.
"""

from collections.abc import Sequence
from dataclasses import replace

from penstock.codecs.spec import parse_spec
from penstock.codecs.wire import SPARSE_CODECS
from penstock.network import Network
from penstock.plan import Plan, Route
from penstock.planners.partitions import partitions_to_measure
from penstock.strategies.options import parse_strategy
from penstock.torch.compression import AUTO, COMPRESSED_ONLY, NATIVE, SPARSE_STRATEGIES, Compression
from penstock.torch.planning import MIXING, compared, decide
from penstock.trace import Trace

DENSE = (NATIVE, "ring", "recursive_doubling")  # what "auto" measures and lets the planner choose from


def candidates(
    strategy: str, compression: Compression, planner: str, engine: str = "gloo", shares_hosts: bool = False
) -> tuple[Route, ...]:
    """Return the routes to measure and plan with first, in as many pieces as strategies cut tensors by themselves.

    A planner that mixes, and codec="auto", have dense ones to choose from too. "auto" measures each codec by the first
    of its strategies; `further` has more of the one that comes out best. Where ranks share hosts, compressing between
    hosts only is one of them.
    """
    dense = tuple(map(Route, _dense(strategy, engine)))
    if compression.codec is None:
        return dense
    if compression.codec == AUTO:
        return (*dense, *(_packed(strategy, each, shares_hosts)[0] for each in compression.candidates))
    return (*(dense if planner in MIXING else ()), *_packed(strategy, compression, shares_hosts))


def _packed(strategy: str, compression: Compression, shares_hosts: bool) -> tuple[Route, ...]:
    """Return the routes of a codec."""
    local = (compression.local_strategy,) if shares_hosts and compression.local_strategy else ()
    names = (*compression.strategies, *local) if strategy == AUTO else (strategy,)
    return tuple(Route(name, compression.codec) for name in names)


def _dense(strategy: str, engine: str) -> tuple[str, ...]:
    """Return what may carry dense buckets: the strategy that was named, where it can.

    Those of ours use host memory, so NCCL's own beats them.
    """
    name, options = parse_strategy(strategy)
    if strategy != AUTO and not {name, options.get("outer")} & {*COMPRESSED_ONLY, *SPARSE_STRATEGIES}:
        return (strategy,)
    return DENSE if engine in ("gloo", "mpi") else (NATIVE,)


def further(
    trace: Trace,
    network: Network,
    planner: str,
    routes: Sequence[Route],
    strategy: str,
    compression: Compression,
    shares_hosts: bool = False,
) -> tuple[Route, ...]:
    """Return what else to measure, now that the lines of `routes` are known.

    With "auto", the other strategies of the codec that is predicted to be fastest. Of that one, and of the codec that
    a mixing planner was given, other numbers of pieces, by the strategy that carries most of what is compressed.
    """
    if compression.codec == AUTO:
        best = compared(trace, network, planner, routes, 1.0)
        plan = best.candidates[best.best_codec] if best.best_codec else best.dense
        chosen = [each for each in compression.candidates if each.codec == best.best_codec]
        more = [route for each in chosen for route in _packed(strategy, each, shares_hosts) if route not in routes]
    elif compression.codec is not None and planner in MIXING:
        plan, more = decide(trace, network, planner, routes).plan, []
    else:
        return ()
    return (*more, *_in_other_pieces(trace, network, plan))


def _in_other_pieces(trace: Trace, network: Network, plan: Plan) -> list[Route]:
    """Return the route that carries most compressed bytes, in other numbers of pieces; sparse blocks have none."""
    nbytes: dict[Route, int] = {}
    for bucket in plan.buckets:
        if bucket.codec is not None and parse_spec(bucket.codec)[0] not in SPARSE_CODECS:
            nbytes[bucket.route] = nbytes.get(bucket.route, 0) + bucket.nbytes
    if not nbytes:
        return []
    route = max(nbytes, key=lambda each: nbytes[each])
    return [replace(route, partitions=k) for k in partitions_to_measure(trace, network, route)]
