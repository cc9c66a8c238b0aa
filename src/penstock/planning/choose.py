"""Which route to measure next, and the plan in the end: what is best if every route not measured were at its best.

Measuring a compressed all-reduce takes a second, and compiling its codec several: not every codec is measured by every
strategy in every number of pieces. A route without a measured line gets an estimate that flatters it (`estimated`). The
plan made with these estimates either uses measured routes only, and then it is the plan; or it says what to measure
next. A codec that was not compiled is taken to send its bytes and to compute nothing, which nothing beats. Once a codec
was measured by the first of its strategies, the others, and other numbers of pieces, are estimated from its curves, by
as much slower or faster as the first was than its own estimate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.codecs.low_rank import NAME as LOW_RANK
from penstock.codecs.registry import SPARSE_CODECS, make_codec
from penstock.codecs.spec import parse_spec
from penstock.cost.ways import Way, way_for
from penstock.curves import CodecCurves, Curve
from penstock.exchange.compression import NATIVE
from penstock.network import LinearCost, Network
from penstock.plan import Plan, Route, parse_route
from penstock.planners.selective import counts_in_pieces, partitions_to_measure
from penstock.planning.candidates import codecs_of
from penstock.planning.decide import MIXING, best_plan, compared, decide, decide_in_lanes, decide_whether
from penstock.planning.planning import Decision
from penstock.runtime.hosts import Nodes, describe_nodes, share_hosts
from penstock.simulator.fitted import fitted_cost
from penstock.simulator.iteration import TIE
from penstock.strategies import find_strategy, parse_strategy
from penstock.trace import Trace

WORTH = TIE  # of an iteration: what a route must promise to save before it is measured
_FREE = Curve(0.0, 0.0)  # of a codec that takes no time
_SIZES = (1 << 12, 1 << 22)  # elements, whose payloads say how many bytes a codec makes of one


@dataclass(frozen=True, slots=True)
class Choice:
    """What a plan is to be chosen from."""

    trace: Trace
    planner: str
    routes: tuple[Route, ...]  # that may be used
    auto: bool = False  # whether the codec is to be chosen too
    trusted: bool = False  # whether closed forms of dense routes count as measured: the network was given
    slowdown: float = 1.0  # of messages while gradients are computed, which counts where compressing must pay
    lanes: int = 1  # buckets that are under way at a time
    bulk: bool = False  # several buckets may travel as one message

    def plan(self, network: Network, routes: Sequence[Route]) -> Plan:
        """Return the plan to run if these were all routes."""
        if self.auto:
            return compared(self.trace, network, self.planner, routes, self.slowdown).plan
        return best_plan(self.trace, network, self.planner, routes)


def choose(choice: Choice, network: Network, routes: tuple[Route, ...], nodes: Nodes = ()) -> Decision:
    """Return the plan that uses some measured routes; say where ranks are, if that changed what was measured."""
    values = choice.trace, network, choice.planner, routes, choice.slowdown
    decision = decide_whether(*values, at_least(choice, network)) if choice.auto else decide(*values)
    decision = decide_in_lanes(decision, routes, choice.lanes, choice.bulk)
    if network.workers == 1:
        return replace(decision, notes=("one worker sends nothing, so nothing is compressed",))
    if not share_hosts(nodes):
        return decision
    found = f"{describe_nodes(nodes)}: summing inside hosts first was measured too, as hierarchical"
    return replace(decision, notes=(*decision.notes, found))


def next_route(choice: Choice, network: Network, worth: float = WORTH) -> Route | None:
    """Return the route to measure next; None where the best plan needs no more.

    What was not measured must promise to save `worth` of an iteration, flattered as it is. First codecs are compared,
    each by the first of its strategies; then the best of them is tried by the others, and in other numbers of pieces.
    """
    if (first := _first(network, choice.routes, choice.trusted)) is not None:
        return first
    plan = choice.plan(*estimated(choice.trace, network, choice.routes))
    codec = next((bucket.codec for bucket in plan.buckets if bucket.codec is not None), None)
    if (route := _promising(choice, network, plan, worth)) is not None or codec is None:
        return route
    cuts = choice.auto or choice.planner in MIXING
    more = choice.plan(*estimated(choice.trace, network, choice.routes, codec, cuts))
    return _promising(choice, network, more, worth)


def _promising(choice: Choice, network: Network, plan: Plan, worth: float) -> Route | None:
    """Return what a plan made with estimates uses most that was not measured, if it beats the best without by enough.

    A codec that was asked for has to be measured, whatever it promises.
    """
    wanted = [bucket for bucket in plan.buckets if not is_known(network, bucket.route, choice.trusted)]
    if not wanted:
        return None
    route = max(wanted, key=lambda bucket: bucket.nbytes).route
    if is_necessary(choice, network, route):
        return route
    so_far = choice.plan(network, known_routes(network, choice.routes, choice.trusted))
    return route if plan.iteration_seconds <= (1 - worth) * so_far.iteration_seconds else None


def is_necessary(choice: Choice, network: Network, route: Route) -> bool:
    """Say whether no plan can be made without this route's line, or none with the codec that was asked for."""
    if route == _first(network, choice.routes, choice.trusted):
        return True
    coded = [each for each in choice.routes if each.codec is not None]
    return not choice.auto and route in coded and not any(is_known(network, each) for each in coded)


def at_least(choice: Choice, network: Network) -> dict[str, float]:
    """Return what an iteration would take at least with each codec that was not measured, in seconds."""
    measured = codecs_of([route for route in choice.routes if str(route) in network.all_reduce])
    if not (left := [codec for codec in codecs_of(choice.routes) if codec not in measured]):
        return {}
    known, considered = estimated(choice.trace, network, choice.routes)
    found = compared(choice.trace, known, choice.planner, considered, choice.slowdown).candidates
    return {codec: found[codec].iteration_seconds for codec in left}


def is_known(network: Network, route: Route, trusted: bool = False) -> bool:
    """Say whether a plan may rely on what a route costs; dense, one worker sends nothing."""
    return str(route) in network.all_reduce or (route.codec is None and (trusted or network.workers == 1))


def known_routes(network: Network, routes: Sequence[Route], trusted: bool = False) -> tuple[Route, ...]:
    """Return the routes that a plan may use: of `routes` those that are known, and those in other pieces."""
    chosen = {(route.strategy, route.codec) for route in routes}
    pieces = map(parse_route, network.all_reduce)
    others = [each for each in pieces if each.partitions > 1 and (each.strategy, each.codec) in chosen]
    return (*(route for route in routes if is_known(network, route, trusted)), *others)


def estimated(
    trace: Trace, network: Network, routes: Sequence[Route], more_of: str | None = None, cuts: bool = False
) -> tuple[Network, tuple[Route, ...]]:
    """Return a network with a line for every route to consider now, and these routes.

    That is what was measured, dense routes, and each codec by the first of its strategies; `more_of` one codec all
    strategies, and with `cuts` other numbers of pieces.
    """
    firsts = {codec: next(each for each in routes if each.codec == codec) for codec in codecs_of(routes)}
    considered = [
        each
        for each in routes
        if str(each) in network.all_reduce
        or (each.codec is None and _can_be_costed(network, each))
        or each in firsts.values()
        or each.codec == more_of is not None
    ]
    if cuts and more_of is not None:
        cut = [route for route in considered if route.codec == more_of]
        considered += [each for route in cut for each in _in_other_pieces(trace, network, route)]
    considered += [route for route in known_routes(network, routes) if route not in considered]
    lines = {str(route): _estimate(trace, network, route, considered) for route in considered}
    return replace(network, all_reduce={**lines, **network.all_reduce}), tuple(considered)


def _first(network: Network, routes: Sequence[Route], trusted: bool) -> Route | None:
    """Return what must be measured before anything can be compared: the engine's own way, or else the first."""
    native = Route(NATIVE)
    if native in routes and not is_known(network, native, trusted):
        return native
    return None if any(is_known(network, route, trusted) for route in routes) else routes[0]


def _can_be_costed(network: Network, route: Route) -> bool:
    """Say whether a dense route has a cost: the engine's own has none but a measured one."""
    return route.strategy != NATIVE or network.workers == 1 or NATIVE in network.all_reduce


def _estimate(trace: Trace, network: Network, route: Route, routes: Sequence[Route]) -> LinearCost:
    """Return a line that flatters a route which was not measured."""
    if str(route) in network.all_reduce:
        return network.all_reduce[str(route)]
    if route.codec is not None and not _has_closed_form(route):
        return LinearCost(0.0, 0.0)  # no closed form says what it takes at least
    if route.codec is None:
        return LinearCost(0.0, 0.0) if network.workers == 1 else _line(way_for(network, route, estimate=fitted_cost))
    if route.codec not in network.codecs:
        free = {**network.codecs, route.codec: _free_curves(route.codec)}
        return _line(way_for(replace(network, codecs=free), route))
    factor = _measured_over_estimated(trace, network, route.codec, routes)
    line = _line(way_for(network, route))
    return LinearCost(
        factor * line.a_seconds, factor * line.b_seconds_per_byte, factor * (line.c_seconds_per_tensor or 0)
    )


def _has_closed_form(route: Route) -> bool:
    """Say whether a closed form says what a route takes at least: links inside a node are faster than the network's."""
    strategy = find_strategy(parse_strategy(route.strategy)[0])
    return strategy.has_coded_form() and strategy.hands_to is None


def _measured_over_estimated(trace: Trace, network: Network, codec: str, routes: Sequence[Route]) -> float:
    """Return by how much a measured route of a codec differs from its closed form, for one message with everything.

    Closed forms know nothing of cores that ranks share, nor of what is sent while more is encoded.
    """
    found = (each for each in routes if each.codec == codec and str(each) in network.all_reduce)
    for route in found:
        if _has_closed_form(route):
            closed = way_for(replace(network, all_reduce={}), route)
            size = sum(trace.nbytes), len(trace.tensors)
            return way_for(network, route).seconds(*size) / max(closed.seconds(*size), 1e-9)
    return 1.0


def _line(way: Way) -> LinearCost:
    """Return a way as one line; a line's startup holds the first tensor."""
    line, each = way.whole, way.seconds_per_tensor
    return LinearCost(line.a_seconds + each, line.b_seconds_per_byte, each)


def _free_curves(spec: str) -> CodecCurves:
    """Return curves of a codec that computes nothing, and the bytes it makes, as far as its kernels need not be known.

    Payloads that vary in size may be next to nothing.
    """
    codec = make_codec(spec)
    if codec.capabilities.variable_size:
        return CodecCurves(0.0, _FREE, _FREE, _FREE, 0.0, _FREE)
    less, more = (codec.max_nbytes(numel) for numel in _SIZES)
    ratio = (more - less) / (4 * (_SIZES[1] - _SIZES[0]))
    return CodecCurves(ratio, _FREE, _FREE, _FREE, max(0.0, less - ratio * 4 * _SIZES[0]), _FREE)


def _in_other_pieces(trace: Trace, network: Network, route: Route) -> list[Route]:
    """Return a route that was measured in other numbers of pieces; sparse blocks and factors have none."""
    can_be_cut = route.codec is not None and parse_spec(route.codec)[0] not in (*SPARSE_CODECS, LOW_RANK)
    if not can_be_cut or str(route) not in network.all_reduce or counts_in_pieces(route.strategy) is None:
        return []
    return [replace(route, partitions=k) for k in partitions_to_measure(trace, network, route)]
