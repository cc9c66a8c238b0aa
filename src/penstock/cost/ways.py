"""A `Way`: how a bucket can travel and what that costs; planners choose among ways without knowing more."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.cost.collectives import ALL_REDUCE, CostFunction, parameter_server
from penstock.cost.compressed import COMPRESSED, CompressedCost
from penstock.cost.sparse import SPARSE, sparse_cost
from penstock.errors import NetworkError
from penstock.network import LinearCost, Network
from penstock.plan import Route, parse_route

PARAMETER_SERVER = "parameter_server"
NETWORK_LANE = "network"
_COMPRESSED_ONLY = set(COMPRESSED) - set(ALL_REDUCE) - {PARAMETER_SERVER}


@dataclass(frozen=True, slots=True)
class Way:
    """One way of synchronising a bucket."""

    strategy: str
    stages: tuple[LinearCost, ...]  # one for an all-reduce; push and pull for parameter servers
    lanes: tuple[str, ...] = (NETWORK_LANE,)  # the resource each stage occupies, in timelines
    measured: bool = False  # False: computed from alpha, beta, gamma and the codec's curves
    codec: str | None = None  # None: dense
    partitions: int = 1  # pieces of each tensor; 1: as the strategy cuts it
    seconds_per_tensor: float = 0.0  # of the first stage: each tensor's own calls of the codec

    @property
    def route(self) -> Route:
        """What to do, in words."""
        return Route(self.strategy, self.codec, self.partitions)

    @property
    def whole(self) -> LinearCost:
        """All stages one after the other, as one line."""
        total = self.stages[0]
        for stage in self.stages[1:]:
            total = total + stage
        return total

    def one_stage(self) -> "Way":
        """Return the way with its stages one after the other, as if they were one."""
        return replace(self, stages=(self.whole,), lanes=(NETWORK_LANE,))

    def stage_seconds(self, nbytes: float, tensors: int) -> tuple[float, ...]:
        """Return how long each stage takes for a bucket of `tensors` tensors and `nbytes` dense bytes."""
        first, *rest = (stage.seconds(nbytes) for stage in self.stages)
        return first + self.seconds_per_tensor * tensors, *rest

    def seconds(self, nbytes: float, tensors: int = 1) -> float:
        """Return how long a bucket takes, all stages one after the other."""
        return sum(self.stage_seconds(nbytes, tensors))


def way_for(network: Network, route: str | Route, workers: int | None = None) -> Way:
    """Return the way that `route` says on `network` with `workers` workers (default: the network's own number).

    A measured line of the network holds for the number of workers it was measured with; for any other number, and for
    routes that were not measured, the closed form is used.
    """
    chosen = _as_route(network, route)
    p = network.workers if workers is None else workers
    if p < 1:
        raise NetworkError(f"{p} workers; wanted at least 1")
    if str(chosen) in network.all_reduce and p == network.workers:
        return _measured_way(network, chosen)
    if chosen.codec is not None:
        return _compressed_way(network, chosen, p)
    if chosen.strategy == PARAMETER_SERVER:
        return Way(chosen.strategy, parameter_server(network, p), ("push", "pull"))
    if chosen.strategy in ALL_REDUCE:
        return Way(chosen.strategy, (ALL_REDUCE[chosen.strategy](network, p),))
    raise NetworkError(_unknown(network, str(chosen), p, ALL_REDUCE))


def ways_for(
    network: Network,
    strategies: Sequence[str],
    codecs: Sequence[str] = (),
    partitions: Sequence[int] = (1,),
    workers: int | None = None,
) -> list[Way]:
    """Return every strategy dense and with every codec, each with every number of partitions that can be costed.

    Some strategies, such as `all_gather`, carry only what is compressed. Where a strategy was measured with a codec,
    only what was measured is considered: beside a measurement a closed form looks better than it is, since it knows
    nothing of busy processors.
    """
    names = _plain_names(network, strategies)
    dense = [way_for(network, name, workers) for name in names if name not in (*_COMPRESSED_ONLY, *SPARSE)]
    return [*dense, *compressed_ways(network, strategies, codecs, partitions, workers)]


def compressed_ways(
    network: Network,
    strategies: Sequence[str],
    codecs: Sequence[str],
    partitions: Sequence[int] = (1,),
    workers: int | None = None,
) -> list[Way]:
    """Return every strategy with every codec, as `ways_for` does; nothing dense."""
    names = _plain_names(network, strategies)
    routes = [Route(name, codec, k) for name in names for codec in codecs for k in partitions]
    measured = _measured_pairs(network) if workers in (None, network.workers) else set()
    return [way_for(network, route, workers) for route in routes if _can_be_costed(network, route, measured)]


def _plain_names(network: Network, strategies: Sequence[str]) -> list[str]:
    return [strategy if strategy in network.all_reduce else strategy.replace("-", "_") for strategy in strategies]


def comparable(ways: Sequence[Way]) -> list[Way]:
    """Return ways that buckets of one iteration can mix.

    A parameter server's push and pull overlap those of other buckets only if all buckets go that way. Among other ways
    they are taken one after the other, which is also what running one program at a time does.
    """
    same = len({len(way.stages) for way in ways}) <= 1
    return list(ways) if same else [way.one_stage() for way in ways]


def _measured_pairs(network: Network) -> set[tuple[str, str | None]]:
    routes = (parse_route(text) for text in network.all_reduce)
    return {(route.strategy, route.codec) for route in routes if route.codec is not None}


def _can_be_costed(network: Network, route: Route, measured: set[tuple[str, str | None]]) -> bool:
    if (route.strategy, route.codec) in measured:
        return str(route) in network.all_reduce
    if route.strategy in SPARSE:
        curves = network.codecs.get(str(route.codec))
        return route.partitions == 1 and curves is not None and curves.block_merge is not None
    return route.strategy in COMPRESSED


def _as_route(network: Network, route: str | Route) -> Route:
    if isinstance(route, Route):
        return route
    return Route(route) if route in network.all_reduce and "+" not in route else parse_route(route)


def _measured_way(network: Network, route: Route) -> Way:
    """Return a measured line. What further tensors add was measured too, or comes from the codec's curves.

    Those are of calls by themselves, and much too high for an executor that has looked everything up before: measured
    to add nothing is not the same as not measured.
    """
    line = network.all_reduce[str(route)]
    further = line.c_seconds_per_tensor
    if further is None and route.codec is not None and route.codec in network.codecs and route.strategy in COMPRESSED:
        curves = network.codecs[route.codec]
        further = COMPRESSED[route.strategy](network, curves, network.workers, route.partitions).seconds_per_tensor
    further = further or 0.0
    return Way(
        route.strategy,
        (LinearCost(max(0.0, line.a_seconds - further), line.b_seconds_per_byte) if further else line,),
        measured=True,
        codec=route.codec,
        partitions=route.partitions,
        seconds_per_tensor=further,
    )


def _compressed_way(network: Network, route: Route, workers: int) -> Way:
    assert route.codec is not None
    if route.codec not in network.codecs:
        known = ", ".join(network.codecs) or "none"
        raise NetworkError(
            f"network {network.name!r} has no curves of codec {route.codec!r}; it has: {known}; "
            f"measure them with `penstock measure --codecs {route.codec}`"
        )
    if route.strategy in SPARSE and network.codecs[route.codec].block_merge is None:
        raise NetworkError(f"{route}: {route.strategy} merges blocks, which {route.codec} cannot; use sparse")
    if route.strategy not in (*COMPRESSED, *SPARSE):
        raise NetworkError(
            f"{route}: no closed form of a compressed {route.strategy}; wanted one of "
            f"{', '.join((*COMPRESSED, *SPARSE))}, "
            f"or measure it with `penstock measure --strategies '{route}'`"
        )
    if workers == 1:
        return Way(route.strategy, (LinearCost(0.0, 0.0),), codec=route.codec, partitions=route.partitions)
    cost = _compressed_cost(network, route, workers)
    return Way(
        route.strategy,
        (cost.line,),
        codec=route.codec,
        partitions=route.partitions,
        seconds_per_tensor=cost.seconds_per_tensor,
    )


def _compressed_cost(network: Network, route: Route, workers: int) -> CompressedCost:
    curves = network.codecs[str(route.codec)]
    if route.strategy in SPARSE:
        return sparse_cost(route.strategy, network, curves, workers)
    return COMPRESSED[route.strategy](network, curves, workers, route.partitions)


def _unknown(network: Network, strategy: str, p: int, known: Mapping[str, CostFunction]) -> str:
    if strategy in network.all_reduce:
        return (
            f"network {network.name!r} measured {strategy!r} with {network.workers} workers, and it has no closed form "
            f"for {p}; use --workers {network.workers} or one of {', '.join([*known, PARAMETER_SERVER])}"
        )
    measured = ", ".join(network.all_reduce) or "none"
    names = ", ".join([*known, PARAMETER_SERVER])
    return f"no all-reduce called {strategy!r}; measured in network {network.name!r}: {measured}; closed forms: {names}"
