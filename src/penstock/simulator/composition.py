"""Times an iteration as lanes run it: several buckets under way at a time, on one processor and one NIC of each rank.

`simulate_composition` is the program's clock (`simulator/program.py`) for a `Composition`: an instruction of a bucket
starts once its gradients are ready and its lane is free on the ranks that take part. Where several could start, that of
the earliest bucket goes first.

`simulate_plan` times a plan. What a bucket takes by itself is what its way says, measured or not; how that divides into
computing and sending, and so what another bucket can do meanwhile, is what its program says. So with one lane the
result is that of `simulate_iteration`, and with several it differs by what overlaps:

    two buckets of: encode 1, send 2, decode 1; both ready at 0

    one lane       |e|s s|d|e|s s|d|            8
    two lanes      computation    |e|e|  |d|  |d|        6
                   communication    |s s|s s|
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from penstock.cost.ways import NETWORK_LANE, Way, comparable
from penstock.network import Network
from penstock.plan import Plan, Route, cut_into_buckets
from penstock.planners import PLANNERS
from penstock.planners.batched import in_bulks
from penstock.program import Op, Program
from penstock.program.composition import LANES, Composition, compose
from penstock.simulator.calibrate import Clock, clock_of, instructions
from penstock.simulator.engine import Task, run_tasks
from penstock.simulator.iteration import (
    TIE,
    computation,
    fewest_messages,
    last_tensors,
    simulate_iteration,
    squeezed,
    stretched,
    way_of,
)
from penstock.simulator.program import ENGINE, Key, Translation, pools
from penstock.timeline import COMMUNICATION, COMPUTATION, Span, Timeline
from penstock.trace import Trace

MOST_INSTRUCTIONS = 200_000  # of an iteration that is timed in lanes, all ranks together: several seconds
UNLIKE = 1.5  # times as many messages: plans by the same routes that differ by less are one to a race
RIVALS, CLOSE = 2, 0.2  # plans beside the best that may be run to see which is faster, predicted within this part of it
MERGING = ("exact", "joint")  # planners that weigh startups, so that their buckets need no bulks
OTHERS = 2  # ways beside those of a joint plan that are tried: timing one in lanes takes up to a second
CUTS = (2, 4, 8, 16)  # parts of all bytes that long messages are cut into
MOST_SLOWDOWN = 1.1  # of messages by computation: above that both want the same cores


Translated = tuple[list[Task], list[list[Key]]]  # of a program, and the instructions of each task


def simulate_composition(
    composition: Composition,
    network: Network,
    ready_seconds: Sequence[float],
    clocks: Sequence[Clock],
    names: Sequence[str],
) -> Timeline:
    """Return what each rank does when, in two lanes; `ready_seconds`, `clocks` and `names` are those of the buckets."""
    tasks, labels, finished = list[Task](), list[tuple[str, str, int] | None](), list[list[int]]()
    alike: dict[tuple[int, int], Translated] = {}  # buckets with one program and clock
    for program, clock in zip(composition.programs, clocks, strict=True):
        if (id(program), id(clock)) not in alike:
            made = Translation(program, network, clock.itemsize, clock.codec, clock.native_seconds, clock.overhead)
            alike[id(program), id(clock)] = made.tasks_and_keys()
    translated = [alike[id(program), id(clock)] for program, clock in zip(composition.programs, clocks, strict=True)]
    places: list[dict[int, int]] = [{} for _ in translated]  # of each program's tasks, in `tasks`
    for place, (number, begin, end) in enumerate(composition.pieces):
        program, ready, earlier = composition.programs[number], len(tasks), composition.before(place)
        is_second = place >= len(composition.programs)
        tasks.append(Task(max(ready_seconds) if is_second else ready_seconds[number]))
        labels.append(None)
        gates = [(ready,) if earlier is None else (ready, finished[earlier][r]) for r in range(program.world_size)]
        ends: list[list[int]] = [[ready] for _ in range(program.world_size)]
        everything = list(zip(*translated[number], strict=True))
        chosen = [i for i, (_, ((rank, index), *_)) in enumerate(everything) if begin[rank] <= index < end[rank]]
        places[number] |= {index: len(tasks) + count for count, index in enumerate(chosen)}
        for task, keys in (everything[index] for index in chosen):
            ranks = sorted({rank for rank, _ in keys})
            waits = {places[number][each] for each in task.after}.union(*(gates[rank] for rank in ranks))
            uses = _resources(program, task, keys)
            for rank in ranks:
                ends[rank].append(len(tasks))
            tasks.append(Task(clocks[number].pace * task.seconds, uses, tuple(sorted(waits)), task.pool))
            drawn = task.seconds and task.uses and task.uses[0][0] != ENGINE  # type: ignore[index]  # named so
            labels.append(_label(program, names[number], keys) if drawn else None)
        finished.append(list(range(len(tasks), len(tasks) + program.world_size)))
        for rank, last in enumerate(ends):
            tasks.append(Task(0.0, (), (*gates[rank], *last)))
            labels.append(None)
    ran = run_tasks(tasks, pools(network, composition.world_size))
    return Timeline(
        tuple(
            Span(label[0], label[1], each.start_seconds, each.end_seconds, label[2])
            for label, each in zip(labels, ran, strict=True)
            if label is not None
        )
    )


def _resources(program: Program, task: Task, keys: Sequence[Key]) -> tuple[tuple[str, int], ...]:
    """Return what a task occupies: the engine's own collective both directions of all NICs, no processor."""
    rank, index = keys[0]
    if program.ranks[rank][index].op is Op.NATIVE:
        return tuple((way, each) for each, _ in keys for way in ("in", "out"))
    return task.uses  # type: ignore[return-value]  # a translation names resources so


def _label(program: Program, name: str, keys: Sequence[Key]) -> tuple[str, str, int]:
    rank, index = next((key for key in keys if program.ranks[key[0]][key[1]].op is Op.SEND), keys[0])
    sends = program.ranks[rank][index].op in (Op.SEND, Op.RECV, Op.NATIVE)
    return name, COMMUNICATION if sends else COMPUTATION, rank


def simulate_plan(
    plan: Plan, trace: Trace, ways: Sequence[Way], network: Network, lanes: int, ranks: Sequence[int] = (0,)
) -> Timeline:
    """Return the iteration that a plan takes in so many lanes, as `ranks` see it: whole messages, and instructions.

    In fewer lanes where `timed_lanes` says so.
    """
    plan, lanes = plan.merged, timed_lanes(plan, trace, network, lanes)
    if lanes == 1 and not _says_more_than_lines(plan, network):
        return simulate_iteration(trace, plan.buckets, comparable(ways), overlap=plan.overlap)
    by_route, numel = {way.route: way for way in ways}, {each.name: each.numel for each in trace.tensors}
    alike: dict[tuple[Route, tuple[int, ...]], tuple[Program, Clock]] = {}
    for each in plan.buckets:
        sizes = tuple(numel[name] for name in each.tensors)
        if (each.route, sizes) not in alike:
            alike[each.route, sizes] = clock_of(network, plan.workers, each, sizes, way_of(by_route, each))
    shapes = [alike[each.route, tuple(numel[name] for name in each.tensors)] for each in plan.buckets]
    ready = trace.ready_seconds
    moments = [ready[each] if plan.overlap else ready[-1] for each in last_tensors(trace, plan.buckets)]
    composition = compose([program for program, _ in shapes], lanes)
    clocks, names = [clock for _, clock in shapes], [bucket.name for bucket in plan.buckets]
    timeline = simulate_composition(composition, network, moments, clocks, names)
    tasks, spans = computation(trace, ready)
    computed = [
        Span(name, lane, ran.start_seconds, ran.end_seconds)
        for (name, lane), ran in zip(spans, run_tasks(tasks), strict=True)
    ]
    seen = [span for span in timeline.spans if span.rank in ranks]
    return Timeline((*computed, *_whole_buckets(seen), *seen))


def timed_lanes(plan: Plan, trace: Trace, network: Network, lanes: int) -> int:
    """Return in how many lanes a plan is timed: in one where a codec's curves are not known, or it has too many parts.

    Buckets are then taken to go one after the other: what is predicted is too long.
    """
    if lanes == 1 or not _has_curves(plan, network):
        return 1
    numel = {each.name: each.numel for each in trace.tensors}
    found = sum(
        instructions(network, plan.workers, each.route, [numel[name] for name in each.tensors])
        for each in plan.messages
    )
    return lanes if found <= MOST_INSTRUCTIONS else 1


def _says_more_than_lines(plan: Plan, network: Network) -> bool:
    """Say whether more than a line was measured of some bucket's route, so that programs tell what lines do not."""
    lines = (network.all_reduce.get(str(bucket.route)) for bucket in plan.buckets)
    return _has_curves(plan, network) and any(line is not None and line.least_seconds is not None for line in lines)


def _has_curves(plan: Plan, network: Network) -> bool:
    return all(bucket.codec is None or bucket.codec in network.codecs for bucket in plan.buckets)


def _whole_buckets(spans: Sequence[Span]) -> list[Span]:
    """Return each bucket from its first instruction to its last, as each rank sees it."""
    found: dict[tuple[int, str], list[Span]] = {}
    for span in spans:
        found.setdefault((span.rank, span.name), []).append(span)
    return [
        Span(name, NETWORK_LANE, min(e.start_seconds for e in each), max(e.end_seconds for e in each), rank)
        for (rank, name), each in found.items()
    ]


def plan_in_lanes(
    plan: Plan,
    trace: Trace,
    ways: Sequence[Way],
    network: Network,
    lanes: int = LANES,
    slowdown: float = 1.0,
    tie: float = TIE,
    bulk: bool = False,
) -> Plan:
    """Return a plan with the timeline that it has in lanes, or a finer one that is clearly shorter there."""
    return plans_in_lanes(plan, trace, ways, network, lanes, slowdown, tie, bulk)[0]


def plans_in_lanes(
    plan: Plan,
    trace: Trace,
    ways: Sequence[Way],
    network: Network,
    lanes: int = LANES,
    slowdown: float = 1.0,
    tie: float = TIE,
    bulk: bool = False,
) -> list[Plan]:
    """Return a plan, or a finer one, with the timeline that it has in lanes, and its closest rivals.

    With `bulk`, the buckets of planners that do not weigh startups travel in bulks: those that are optimal where one
    message follows the other, or finer ones, or none, where that is clearly shorter.

    `exact` and `joint` are optimal where one bucket follows the other and every message pays its startup by itself. In
    lanes up to `lanes` startups pass at the same time. So both are asked again with startups of which two, or as many
    as there are lanes, share one. And one message is encoded while another travels: long messages are cut, `joint` also
    by other ways alone, since those that compute as long as they send gain most. (Not where cores are shared, as the
    slowdown says: there encoding is not free while others send.) Of what comes of it the fewest messages within `tie`
    of the shortest are taken. Not all plans are considered: how far from the best of all this is,
    `tests/simulator/test_composition.py` compares with brute force.
    """
    if {bucket.route for bucket in plan.buckets} <= {Route("native")}:
        lanes = 1  # the engine's own all-reduces go one after the other
    plans = _choices(plan, trace, ways, lanes, bulk, cut=slowdown < MOST_SLOWDOWN)
    if plans == [plan] and lanes == 1:
        return plans  # which is timed so already
    timed = [_timed(each, simulate_plan(each, trace, ways, network, lanes)) for each in plans]
    chosen = fewest_messages(timed, tie)
    others = sorted((each for each in timed if each is not chosen), key=lambda each: each.iteration_seconds)
    near = _unlike(
        chosen, [each for each in others if (1 - CLOSE) * each.iteration_seconds <= chosen.iteration_seconds]
    )
    if slowdown == 1:
        return [chosen, *near]
    slowed = squeezed(trace, slowdown)
    return [
        _timed(each, stretched(simulate_plan(each, slowed, ways, network, lanes), slowdown)) for each in (chosen, *near)
    ]


def _unlike(chosen: Plan, others: Sequence[Plan]) -> list[Plan]:
    """Return the first few plans that differ clearly from those before them: by routes, or by how many messages."""
    found = [chosen]
    for plan in others:
        count, routes = len(plan.messages), {bucket.route for bucket in plan.buckets}
        alike = (
            routes == {bucket.route for bucket in each.buckets}
            and count < UNLIKE * len(each.messages) < UNLIKE**2 * count
            for each in found
        )
        if not any(alike):
            found.append(plan)
    return found[1 : 1 + RIVALS]


def _timed(plan: Plan, timeline: Timeline) -> Plan:
    return replace(
        plan,
        timeline=timeline,
        iteration_seconds=timeline.iteration_seconds,
        non_overlapped_seconds=timeline.non_overlapped_seconds,
    )


def _choices(plan: Plan, trace: Trace, ways: Sequence[Way], lanes: int, bulk: bool, cut: bool) -> list[Plan]:
    """Return the plans to choose from, all different."""
    used = {bucket.route for bucket in plan.buckets}
    shares, mine = sorted({1, 2, lanes}) if lanes > 1 else [1], [way for way in ways if way.route in used]
    sharing = [[_sharing(way, share) for way in mine] for share in shares]
    if plan.planner in MERGING:
        finer = [replace(plan, buckets=PLANNERS[plan.planner].buckets(trace, some)) for some in sharing[1:]]
        alone = _by_one_way(plan, trace, ways)[:OTHERS] if plan.planner == "joint" and lanes > 1 else []
        plans = [plan, *finer, *alone]
    elif bulk:
        alone, plans = [], [*(in_bulks(plan, trace, some) for some in sharing), plan]
    else:
        return [plan]
    if cut and lanes > 1:
        plans += [_cut(each, trace, parts) for each in (plans[0], *alone) for parts in CUTS]
    return [each for index, each in enumerate(plans) if each not in plans[:index]]


def _by_one_way(plan: Plan, trace: Trace, ways: Sequence[Way]) -> list[Plan]:
    """Return the best plan by each way alone that a plan does not use, the shortest in one lane first."""
    used = {bucket.route for bucket in plan.buckets}
    others = [way for way in ways if way.route not in used]
    found = [replace(plan, buckets=PLANNERS["exact"].buckets(trace, [way])) for way in others]
    return sorted(found, key=lambda each: simulate_iteration(trace, each.buckets, ways).iteration_seconds)


def _cut(plan: Plan, trace: Trace, parts: int) -> Plan:
    """Return a plan whose messages end where they hold that part of all bytes: between tensors, or those of a bulk."""
    limit = sum(bucket.nbytes for bucket in plan.buckets) / parts
    if plan.planner not in MERGING:
        starts = pairwise(accumulate(plan.bulks, initial=0))
        runs = [[bucket.nbytes for bucket in plan.buckets[start:stop]] for start, stop in starts]
        return replace(plan, bulks=tuple(count for run in runs for count in _counts(run, limit)))
    sizes = [trace.nbytes[start:stop] for start, stop in pairwise(_ends(plan))]
    counts = [_counts(each, limit) for each in sizes]
    routes = [bucket.route for bucket, some in zip(plan.buckets, counts, strict=True) for _ in some]
    ends = accumulate(count for some in counts for count in some)
    return replace(plan, buckets=cut_into_buckets(trace, [end - 1 for end in ends], routes))


def _ends(plan: Plan) -> list[int]:
    """Return how many tensors come before each bucket, and how many there are."""
    return list(accumulate((len(bucket.tensors) for bucket in plan.buckets), initial=0))


def _counts(sizes: Sequence[int], limit: float) -> list[int]:
    """Return how many in a row hold at least so many bytes, one run after the other; the last may hold less.

    >>> _counts([3, 3, 9, 1, 1], 5)
    [2, 1, 2]
    """
    found, held = [0], 0.0
    for size in sizes:
        if held >= limit:
            found.append(0)
            held = 0.0
        found[-1] += 1
        held += size
    return found


def _sharing(way: Way, messages: int) -> Way:
    """Return a way whose startup so many messages share."""
    first, *rest = way.stages
    return replace(way, stages=(replace(first, a_seconds=first.a_seconds / messages), *rest))
