"""A `Way`: how a bucket can travel and what that costs; planners choose among ways without knowing more.

What a route costs was measured, or its strategy has a closed form, or the caller hands in what estimates it: the
simulator times any strategy's program (`simulator.fitted`), and is not known here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from shlex import quote
from typing import Any

from penstock.errors import NetworkError, did_you_mean
from penstock.network import LinearCost, Network
from penstock.plan import Route, parse_route
from penstock.strategies import STRATEGIES, Options, Strategy, meeting_codec, parse_strategy
from penstock.strategies.closed_form import CompressedCost

NETWORK_LANE = "network"
Estimate = Callable[[Network, Route, int], CompressedCost]  # what a route without a closed form costs on p workers


@dataclass(frozen=True, slots=True)
class Way:
    """How a bucket may travel (strategy, codec, partitions), and what that costs."""

    strategy: str
    stages: tuple[LinearCost, ...]  # one for an all-reduce; push and pull for parameter servers
    lanes: tuple[str, ...] = (NETWORK_LANE,)  # the resource each stage occupies, in timelines
    measured: bool = False  # False: computed from alpha, beta, gamma and the codec's curves
    simulated: bool = False  # computed by timing the strategy's program, not by a closed form
    codec: str | None = None  # None: dense
    partitions: int = 1  # pieces of each tensor; 1: as the strategy cuts it
    seconds_per_tensor: float = 0.0  # of the first stage: each tensor's own calls of the codec
    coupled: bool = False  # the second stage goes with the first of the next bucket, as one: without its startup
    most_nbytes: float = math.inf  # coupled: of a bucket of several tensors, whose payloads take memory on a device

    @property
    def source(self) -> str:
        """Where the cost comes from."""
        return "measured" if self.measured else "simulated" if self.simulated else "closed form"

    @property
    def route(self) -> Route:
        """The strategy, codec and partitions."""
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
        return replace(self, stages=(self.whole,), lanes=(NETWORK_LANE,), coupled=False)

    def stage_seconds(self, nbytes: float, tensors: int) -> tuple[float, ...]:
        """Return how long each stage takes for a bucket of `tensors` tensors and `nbytes` dense bytes."""
        first, *rest = (stage.seconds(nbytes) for stage in self.stages)
        return first + self.seconds_per_tensor * tensors, *rest

    def coupled_seconds(self, nbytes: Any, tensors: Any) -> tuple[Any, Any]:
        """Return what a bucket's own group of messages takes, and what it adds to the next: numbers, or arrays."""
        first, second = self.stages
        own = first.a_seconds + first.b_seconds_per_byte * nbytes + self.seconds_per_tensor * tensors
        return own, second.b_seconds_per_byte * nbytes

    def seconds(self, nbytes: float, tensors: int = 1) -> float:
        """Return how long a bucket takes, all stages one after the other."""
        return sum(self.stage_seconds(nbytes, tensors))


def way_for(network: Network, route: str | Route, workers: int | None = None, estimate: Estimate | None = None) -> Way:
    """Return the way that `route` says on `network` with `workers` workers (default: the network's own number).

    A measured line of the network holds for the number of workers it was measured with; for any other number, and for
    routes that were not measured, the closed form is used, and `estimate` where the strategy has none. A strategy that
    carries nothing dense, named without a codec, takes the network's first codec that it can carry.
    """
    chosen = _as_route(network, route)
    p = network.workers if workers is None else workers
    if p < 1:
        raise NetworkError(f"{p} workers; wanted at least 1")
    if str(chosen) in network.all_reduce and p == network.workers:
        return _measured_way(network, chosen)
    found = _strategy(chosen)
    if found is None:
        raise NetworkError(_unknown(network, str(chosen), p))
    strategy, options = found
    if chosen.codec is None and _carries_coded_only(strategy, options):
        chosen = replace(chosen, codec=_codec_for(network, chosen, meeting_codec(strategy, options)))
    if chosen.codec is not None:
        return _compressed_way(network, chosen, strategy, options, p, estimate)
    return _dense_way(network, chosen, strategy, options, p, estimate)


def ways_for(
    network: Network,
    strategies: Sequence[str],
    codecs: Sequence[str] = (),
    partitions: Sequence[int] = (1,),
    workers: int | None = None,
    estimate: Estimate | None = None,
) -> list[Way]:
    """Return every strategy dense and with every codec, each with every number of partitions that can be costed.

    Some strategies, such as `all_gather`, carry only what is compressed; without `codecs` they take one of the
    network's. Where a strategy was measured with a codec,
    only what was measured is considered: beside a measurement a closed form looks better than it is, since it knows
    nothing of busy processors.
    """
    dense = [
        way_for(network, name, workers, estimate)
        for name in _plain_names(network, strategies)
        if (found := _strategy(Route(name))) is None or not (codecs and _carries_coded_only(*found))
    ]
    ways = [*dense, *compressed_ways(network, strategies, codecs, partitions, workers, estimate)]
    if strategies and not ways:
        if (missing := next((codec for codec in codecs if codec not in network.codecs), None)) is not None:
            raise NetworkError(_no_curves(network, missing))
        named, given = ", ".join(strategies), ", ".join(codecs)
        raise NetworkError(f"{named} cannot carry {given}; wanted sparse for gtopk and topk_allgather")
    return ways


def compressed_ways(
    network: Network,
    strategies: Sequence[str],
    codecs: Sequence[str],
    partitions: Sequence[int] = (1,),
    workers: int | None = None,
    estimate: Estimate | None = None,
) -> list[Way]:
    """Return every strategy with every codec, as `ways_for` does; nothing dense."""
    names = _plain_names(network, strategies)
    routes = [Route(name, codec, k) for name in names for codec in codecs for k in partitions]
    measured = _measured_pairs(network) if workers in (None, network.workers) else set()
    return [
        way_for(network, route, workers, estimate)
        for route in routes
        if _can_be_costed(network, route, measured, estimate)
    ]


def _strategy(route: Route) -> tuple[Strategy, Options] | None:
    """Return the record and the options that a route names; None for a line that was only ever measured."""
    name, options = parse_strategy(route.strategy)
    strategy = STRATEGIES.get(name.replace("-", "_"))
    return None if strategy is None else (strategy, Options(**options))


def _carries_dense(strategy: Strategy, options: Options) -> bool:
    return strategy.dense and meeting_codec(strategy, options).dense


def _carries_coded_only(strategy: Strategy, options: Options) -> bool:
    meeting = meeting_codec(strategy, options)
    return not _carries_dense(strategy, options) and (meeting.sparse or meeting.coded is not None)


def _codec_for(network: Network, route: Route, strategy: Strategy) -> str:
    """Return the first codec of the network that `strategy`, which carries nothing dense, can carry."""
    for name, curves in network.codecs.items():
        if curves.block_merge is not None or not strategy.sparse:
            return name
    kind, codec = ("blocks of a sparse codec", "sparse") if strategy.sparse else ("what a codec encoded", "onebit")
    raise NetworkError(
        f"{route} carries only {kind}, and network {network.name!r} has no curves of one; "
        f"measure them with `penstock measure --codecs {codec}`"
    )


def _dense_way(
    network: Network, route: Route, strategy: Strategy, options: Options, p: int, estimate: Estimate | None
) -> Way:
    if strategy.stages is not None:
        stages = strategy.stages(network, p, options)
        return Way(route.strategy, tuple(stages.values()), tuple(stages))
    line = strategy.cost(network, p, options) if _carries_dense(strategy, options) else None
    if line is not None:
        return Way(route.strategy, (line,))
    if estimate is None or not _carries_dense(strategy, options) or strategy.name == "native":
        raise NetworkError(_unknown(network, str(route), p))
    return Way(route.strategy, (estimate(network, route, p).line,), simulated=True)


def comparable(ways: Sequence[Way]) -> list[Way]:
    """Return ways that buckets of one iteration can mix.

    A parameter server's push and pull overlap those of other buckets only if all buckets go that way. Among other ways
    they are taken one after the other, which is also what running one program at a time does. Coupled ways stay so.
    """
    same = len({len(way.stages) for way in ways}) <= 1
    return list(ways) if same else [way if way.coupled else way.one_stage() for way in ways]


def _measured_pairs(network: Network) -> set[tuple[str, str | None]]:
    routes = (parse_route(text) for text in network.all_reduce)
    return {(route.strategy, route.codec) for route in routes if route.codec is not None}


def _can_be_costed(
    network: Network, route: Route, measured: set[tuple[str, str | None]], estimate: Estimate | None
) -> bool:
    if (route.strategy, route.codec) in measured:
        return str(route) in network.all_reduce
    found = _strategy(route)
    if found is None:
        return False
    meeting, curves = meeting_codec(*found), network.codecs.get(str(route.codec))
    if meeting.sparse:
        return route.partitions == 1 and curves is not None and curves.block_merge is not None
    return meeting.coded is not None and (meeting.has_coded_form() or estimate is not None)


def _as_route(network: Network, route: str | Route) -> Route:
    if isinstance(route, Route):
        return route
    return Route(route) if route in network.all_reduce and "+" not in route else parse_route(route)


def _plain_names(network: Network, strategies: Sequence[str]) -> list[str]:
    return [strategy if strategy in network.all_reduce else strategy.replace("-", "_") for strategy in strategies]


def _measured_way(network: Network, route: Route) -> Way:
    """Return a measured line. What further tensors add was measured too, or comes from the codec's curves.

    Those are of calls by themselves, and much too high for an executor that has looked everything up before: measured
    to add nothing is not the same as not measured.

    What is queued on a device in several rounds is coupled: its first round, and all later ones as one stage. These go
    with the first rounds of several buckets, and here with that of the next: R rounds of B buckets start B + R - 1
    groups of messages in either case, and no byte of a bucket travels before its own first round.
    """
    line = network.all_reduce[str(route)]
    further = line.c_seconds_per_tensor
    if further is None and route.codec is not None and route.codec in network.codecs:
        further = _closed_further_seconds(network, route)
    further = further or 0.0
    whole = LinearCost(max(0.0, line.a_seconds - further), line.b_seconds_per_byte) if further else line
    rounds = line.rounds or 1
    coupled = rounds >= 2
    first = LinearCost(whole.a_seconds / rounds, whole.b_seconds_per_byte / rounds)
    later = LinearCost((rounds - 1) * first.a_seconds, (rounds - 1) * first.b_seconds_per_byte)
    return Way(
        route.strategy,
        (first, later) if coupled else (whole,),
        (NETWORK_LANE, NETWORK_LANE) if coupled else (NETWORK_LANE,),
        coupled=coupled,
        measured=True,
        codec=route.codec,
        partitions=route.partitions,
        seconds_per_tensor=further,
    )


def _closed_further_seconds(network: Network, route: Route) -> float:
    """Return what a further tensor costs by the closed form, of strategies that take any codec; 0 without one."""
    found = _strategy(route)
    if found is None or meeting_codec(*found).sparse:
        return 0.0
    strategy, options = found
    curves = network.codecs[str(route.codec)]
    cost = strategy.coded_cost(network, curves, network.workers, route.partitions, options)
    return 0.0 if cost is None else cost.seconds_per_tensor


def _no_curves(network: Network, codec: str) -> str:
    known = ", ".join(network.codecs) or "none"
    return (
        f"network {network.name!r} has no curves of codec {codec!r}; it has: {known}; "
        f"measure them with `penstock measure --codecs {quote(codec)}`"
    )


def _compressed_way(
    network: Network, route: Route, strategy: Strategy, options: Options, workers: int, estimate: Estimate | None
) -> Way:
    assert route.codec is not None
    if route.codec not in network.codecs:
        raise NetworkError(_no_curves(network, route.codec))
    meeting = meeting_codec(strategy, options)
    if meeting.sparse and network.codecs[route.codec].block_merge is None:
        raise NetworkError(f"{route}: {meeting.name} merges blocks, which {route.codec} cannot; use sparse")
    if meeting.coded is None and not meeting.sparse:
        carrying = ", ".join(one.name for one in STRATEGIES.values() if one.coded is not None or one.sparse)
        raise NetworkError(f"{route}: {meeting.name} carries nothing encoded; wanted one of {carrying}")
    if workers == 1:
        return Way(route.strategy, (LinearCost(0.0, 0.0),), codec=route.codec, partitions=route.partitions)
    cost = strategy.coded_cost(network, network.codecs[route.codec], workers, route.partitions, options)
    simulated = cost is None
    if cost is None:
        if estimate is None:
            raise NetworkError(_no_coded_form(route, meeting))
        cost = estimate(network, route, workers)
    return Way(
        route.strategy,
        (cost.line,),
        simulated=simulated,
        codec=route.codec,
        partitions=route.partitions,
        seconds_per_tensor=cost.seconds_per_tensor,
    )


def _no_coded_form(route: Route, strategy: Strategy) -> str:
    closed = ", ".join(one.name for one in STRATEGIES.values() if one.has_coded_form())
    return (
        f"{route}: no closed form of a compressed {strategy.name}; wanted one of {closed}, "
        f"or measure it with `penstock measure --strategies '{route}'`"
    )


def _unknown(network: Network, strategy: str, p: int) -> str:
    known = ", ".join(one.name for one in STRATEGIES.values() if one.costs)
    if strategy in network.all_reduce:
        return (
            f"network {network.name!r} measured {strategy!r} with {network.workers} workers, and it has no closed form "
            f"for {p}; use --workers {network.workers} or one of {known}"
        )
    measured = ", ".join(network.all_reduce) or "none"
    return (
        f"no all-reduce called {strategy!r}; measured in network {network.name!r}: {measured}; closed forms: {known}"
        f"{did_you_mean(strategy, STRATEGIES)}"
    )
