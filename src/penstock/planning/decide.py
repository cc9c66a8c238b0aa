"""Decides on a plan: the best of those that measured routes allow, and whether compressing pays."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from penstock.codecs.codec import Codec
from penstock.codecs.registry import make_codec
from penstock.cost.ways import Way, comparable, way_for
from penstock.errors import PlanError
from penstock.exchange.compression import NATIVE
from penstock.network import LinearCost, Network
from penstock.plan import Plan, Route, cut_into_buckets
from penstock.planners import PLANNERS, Planner
from penstock.planners.batched import plan_batched
from penstock.planners.staged import CoupledCuts
from penstock.planning.observed import ABOUT, MOST
from penstock.planning.planning import Decision
from penstock.simulator.auto import CodecDecision, decide_among
from penstock.simulator.composition import plans_in_lanes
from penstock.simulator.fitted import fitted_cost
from penstock.simulator.iteration import TIE, fewest_messages, predict, predict_robust, timed
from penstock.trace import ITEMSIZE, Trace

PAYLOAD_SHARE = 0.04  # of the bytes of all gradients: payloads of a bucket that is queued on a device
LEAST_PAYLOAD_NBYTES = 1 << 20  # at 10 Gb/s a round of less takes about as long as starting it
MIXING = {  # planners that choose for each gradient whether to compress it, and in how many pieces
    "selective": replace(PLANNERS["selective"], buckets=plan_batched),  # neighbours that chose alike travel together
    "joint": PLANNERS["joint"],
}


def decide(trace: Trace, network: Network, planner: str, routes: Sequence[Route], slowdown: float = 1.0) -> Decision:
    """Plan `trace` on `network` with `planner`, and predict what every planner would give.

    Where there is a codec, planners that do not mix compress every bucket, as their strategies cut it. Plans are made
    and compared at the speed that messages have by themselves, which is what planners know (`simulator.predict`); the
    slowdown counts in what the chosen plan is predicted to take.
    """
    mixing = MIXING if any(route.codec for route in routes) else {}
    plans = {name: best_plan(trace, network, name, routes) for name in PLANNERS if name not in mixing}
    plans |= {name: _mixed_plan(trace, network, name, routes, plans["exact"]) for name in mixing}
    alternatives = tuple((name, plan.iteration_seconds) for name, plan in plans.items())
    plan = timed(plans[planner], trace, comparable(_ways(trace, network, routes)), slowdown)
    return Decision(plan, trace, network, alternatives, notes=_notes(routes), slowdown=slowdown)


def best_plan(trace: Trace, network: Network, planner: str, routes: Sequence[Route]) -> Plan:
    """Return the plan of one planner, as `decide` makes it."""
    if planner in MIXING and any(route.codec for route in routes):
        return _mixed_plan(trace, network, planner, routes, best_plan(trace, network, "exact", routes))
    every = [route for route in routes if route.codec and route.partitions == 1] or routes
    return _clearly_best(trace, network, PLANNERS[planner], every)


def _mixed_plan(trace: Trace, network: Network, planner: str, routes: Sequence[Route], plain: Plan) -> Plan:
    ways = comparable(_ways(trace, network, routes))
    mixed = predict_robust(trace, MIXING[planner], ways, network.workers)
    return fewest_messages([mixed, replace(plain, planner=mixed.planner)])


def decide_whether(
    trace: Trace,
    network: Network,
    planner: str,
    routes: Sequence[Route],
    slowdown: float = 1.0,
    unmeasured: Mapping[str, float] | None = None,
) -> Decision:
    """Plan without codecs and with each, and compress only where that is predicted to pay.

    `unmeasured` are codecs that could not be the best, by the least that an iteration would take with them.
    """
    found = compared(trace, network, planner, routes, slowdown)
    packed = [route for route in routes if route.codec == found.plan_codec]
    left_out = ", ".join(f"{codec} at least {1e3 * seconds:.4g} ms" for codec, seconds in (unmeasured or {}).items())
    reason = f"{found.reason}; not measured: {left_out}" if left_out else found.reason
    return Decision(found.plan, trace, network, (), reason, _notes(packed), slowdown)


def compared(
    trace: Trace, network: Network, planner: str, routes: Sequence[Route], slowdown: float = 1.0
) -> CodecDecision:
    """Return the best plan without a codec and with each that `routes` name, the safest first, and which to run."""
    ways = _ways(trace, network, routes)
    packed: dict[str, list[Way]] = {}
    for way in ways:
        if way.codec is not None:
            packed.setdefault(way.codec, []).append(way)
    dense = [way for way in ways if way.codec is None]
    chosen = MIXING.get(planner, PLANNERS["joint"])
    return decide_among(trace, network.workers, dense, packed, slowdown=slowdown, planner=chosen)


def _notes(routes: Sequence[Route]) -> tuple[str, ...]:
    """Return a sentence for every codec that keeps no residual."""
    codecs = {route.codec: make_codec(route.codec) for route in routes if route.codec}
    return tuple(
        f"{spec} travels without error feedback: its noise is larger than what it rounds, a residual would grow"
        for spec, codec in codecs.items()
        if not codec.takes_feedback
    )


def _clearly_best(trace: Trace, network: Network, planner: Planner, routes: Sequence[Route]) -> Plan:
    """Return the plan that uses the first route only, unless choosing among all saves clearly more.

    The first takes the least processor time (the engine's own runs without the interpreter, a ring decodes the least),
    and what communication takes from computation on the same cores is in no prediction.
    """
    ways = _ways(trace, network, routes)
    first, best = (predict(trace, planner, some, network.workers) for some in (ways[:1], ways))
    return best if best.iteration_seconds < (1 - TIE) * first.iteration_seconds else first


def decide_in_lanes(decision: Decision, routes: Sequence[Route], lanes: int, bulk: bool = False) -> Decision:
    """Return the decision as it is with several buckets under way at a time, perhaps with more of them, or in bulks."""
    plan, trace, network = decision.plan, decision.trace, decision.network
    if (lanes == 1 and not bulk) or trace is None or network is None or network.workers == 1:
        return decision
    ways = comparable(_ways(trace, network, routes))
    by_route = {way.route: way for way in ways}
    if by_route[plan.buckets[0].route].coupled:
        return replace(decision, rivals=_coupled_rivals(plan, trace, by_route[plan.buckets[0].route]))
    found = plans_in_lanes(plan, trace, ways, network, lanes, decision.slowdown, bulk=bulk)
    return replace(decision, plan=found.plan, rivals=found.rivals, notes=(*decision.notes, *found.notes))


def _coupled_rivals(plan: Plan, trace: Trace, way: Way) -> tuple[Plan, ...]:
    """Return plans by the same coupled way with fewer and with more messages that are predicted to take about as long.

    What a message takes from the model on the same device is in no line.
    """
    cuts = CoupledCuts(trace.ready_seconds, list(accumulate(trace.nbytes, initial=0)), way)
    earliest = 1 + cuts.seconds.index(min(cuts.seconds))
    counts = {cuts.fewest(TIE), min(earliest, 2 * len(plan.buckets))} - {len(plan.buckets)}
    found = []
    for count in sorted(counts):
        ends = cuts.ends(count)
        buckets = cut_into_buckets(trace, ends, [way.route] * len(ends))
        found.append(timed(replace(plan, buckets=buckets, bulks=()), trace, [way]))
    return tuple(found)


def learnt(decision: Decision, measured_seconds: float) -> Decision:
    """Return a decision whose slowdown is the one with which its plan takes what its iterations were measured to take.

    On a GPU, messages wait for room among the model's kernels, and take some from them: how much, only iterations of
    the plan tell. It is 1 where the prediction was about right: of what is hidden anyway, noise would make anything.
    """
    trace, network = decision.trace, decision.network
    if trace is None or network is None:
        return decision
    routes = list(dict.fromkeys(bucket.route for bucket in decision.plan.buckets))
    ways = comparable(_ways(trace, network, routes))
    low, high = 1.0, MOST
    if measured_seconds <= ABOUT * timed(decision.plan, trace, ways).iteration_seconds:
        high = low
    while high - low > 0.01:
        middle = (low + high) / 2
        if timed(decision.plan, trace, ways, middle).iteration_seconds < measured_seconds:
            low = middle
        else:
            high = middle
    return replace(decision, plan=timed(decision.plan, trace, ways, high), slowdown=high)


def _ways(trace: Trace, network: Network, routes: Sequence[Route]) -> list[Way]:
    """Return what a bucket may cost; the engine's own way only where it was measured, since it has no closed form."""
    alone = network.workers == 1  # it sends nothing, whatever the engine
    wanted = [route for route in routes if route.strategy != NATIVE or alone or str(route) in network.all_reduce]
    if not wanted:
        raise PlanError(
            f"network {network.name!r} has no measured line for {NATIVE!r}; measure it, or choose a strategy"
        )
    return [_way(trace, network, route) for route in wanted]


def _way(trace: Trace, network: Network, route: Route) -> Way:
    """Return what a route costs; one worker sends nothing, by whatever route."""
    if network.workers == 1:
        return Way(route.strategy, (LinearCost(0.0, 0.0),), codec=route.codec, partitions=route.partitions)
    way = way_for(network, route, estimate=fitted_cost)
    if not way.coupled or route.codec is None:
        return way
    return replace(way, most_nbytes=_most_nbytes(trace, make_codec(route.codec)))


def _most_nbytes(trace: Trace, codec: Codec) -> float:
    """Return how large a bucket of several tensors may be whose payloads are queued on a device, in bytes of gradients.

    About 1.75 payloads of the largest bucket are held there. The largest tensor's are in any case: a bucket that is a
    tenth larger is as good.
    """
    payload_nbytes = max(PAYLOAD_SHARE * sum(trace.nbytes), LEAST_PAYLOAD_NBYTES)
    ratio = codec.max_nbytes(1 << 20) / (ITEMSIZE[trace.dtype] << 20)
    return max(payload_nbytes / ratio, 1.1 * max(trace.nbytes, default=0))
