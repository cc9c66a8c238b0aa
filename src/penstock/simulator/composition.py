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

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from penstock.cost.ways import NETWORK_LANE, Way, comparable
from penstock.network import Network
from penstock.plan import Plan, Route, cut_into_buckets
from penstock.planners import PLANNERS
from penstock.planners.batched import in_bulks
from penstock.program import Op, Program
from penstock.program.builder import without_collecting
from penstock.program.composition import LANES, Composition, compose
from penstock.simulator.calibrate import Clock, clock_of, instructions
from penstock.simulator.engine import Ran, Task, run_tasks
from penstock.simulator.iteration import (
    TIE,
    computation,
    fewest_messages,
    last_tensors,
    simulate_iteration,
    squeezed,
    stretched,
    way_of,
    with_timeline,
)
from penstock.simulator.program import ENGINE, Key, Translation, pools
from penstock.timeline import COMMUNICATION, COMPUTATION, Span, Timeline, bucket_of, in_turn
from penstock.trace import Trace

MOST_INSTRUCTIONS = 60_000  # of all plans that one choice times, all ranks together: less than a second
UNLIKE = 1.5  # times as many messages: plans by the same routes that differ by less are one to a race
RIVALS, CLOSE = 2, 0.2  # plans beside the best that may be run to see which is faster, predicted within this part of it
MERGING = ("exact", "joint")  # planners that weigh startups, so that their buckets need no bulks
OTHERS = 2  # ways beside those of a joint plan that are tried: timing one in lanes takes up to a second
CUTS = (2, 4, 8, 16)  # parts of all bytes that long messages are cut into
MOST_SLOWDOWN = 1.1  # of messages by computation: above that both want the same cores


Gates = Sequence[tuple[int, ...]]  # of each rank, the tasks that a bucket's first instructions wait for
Member = tuple[int, Sequence[Key], Gates]  # of a task: the number of its bucket, its instructions, what they wait for
_WIRE = (Op.SEND, Op.RECV, Op.NATIVE)  # instructions of the communication lane
Translated = list[tuple[Task, tuple[Key, ...]]]  # a program's tasks, each with its instructions


def simulate_composition(
    composition: Composition,
    network: Network,
    ready_seconds: Sequence[float],
    clocks: Sequence[Clock],
    names: Sequence[str],
    ranks: Collection[int] | None = None,
) -> Timeline:
    """Return what each rank does when, in two lanes; `ready_seconds`, `clocks` and `names` are those of the buckets.

    Only `ranks` are drawn where they are given. Spans are what `runtime/recorder.py` measures: a message stands in the
    lanes of both ranks, from when each hands it to the engine to when it knows it finished, one after the other.
    """
    tasks, members, finished = list[Task](), list[Member | None](), list[list[int]]()

    def add(task: Task, member: Member | None = None) -> int:
        tasks.append(task)
        members.append(member)
        return len(tasks) - 1

    translated = _translated(composition, network, clocks)
    places: list[dict[int, int]] = [{} for _ in translated]  # of each program's tasks, in `tasks`
    for place, (number, begin, end) in enumerate(composition.pieces):
        program, earlier = composition.programs[number], composition.before(place)
        is_second = place >= len(composition.programs)
        ready = add(Task(max(ready_seconds) if is_second else ready_seconds[number]))
        gates = [(ready,) if earlier is None else (ready, finished[earlier][r]) for r in range(program.world_size)]
        ends: list[list[int]] = [[ready] for _ in range(program.world_size)]
        firsts = enumerate(keys[0] for _, keys in translated[number])
        chosen = [index for index, (rank, first) in firsts if begin[rank] <= first < end[rank]]
        here = places[number]
        here |= {index: len(tasks) + count for count, index in enumerate(chosen)}
        for task, keys in (translated[number][index] for index in chosen):
            waits = {here[each] for each in task.after}
            for rank, index in keys:  # what waits for another instruction of its rank waits for the gate with it
                if not any(each >= begin[rank] for each in program.ranks[rank][index].after):
                    waits.update(gates[rank])
            seconds, uses = clocks[number].pace * task.seconds, _resources(program, task, keys)
            added = add(Task(seconds, uses, tuple(sorted(waits)), task.pool), (number, keys, gates))
            for rank, _ in keys:
                ends[rank].append(added)
        finished.append([add(Task(0.0, (), (*gates[rank], *last))) for rank, last in enumerate(ends)])
    ran = run_tasks(tasks, pools(network, composition.world_size))
    drawn = range(composition.world_size) if ranks is None else ranks
    return Timeline(tuple(in_turn(_spans(composition, names, tasks, members, ran, drawn))))


def _spans(
    composition: Composition,
    names: Sequence[str],
    tasks: Sequence[Task],
    members: Sequence[Member | None],
    ran: Sequence[Ran],
    ranks: Collection[int],
) -> Iterator[Span]:
    """Yield each instruction of some ranks that takes time, in the order of tasks."""
    ends: dict[tuple[int, Key], int] = {}  # of each bucket's instructions, the task that ends it
    for place, member in enumerate(members):
        if member is not None:
            ends |= {(member[0], key): place for key in member[1] if key[0] in ranks}
    for place, (task, member) in enumerate(zip(tasks, members, strict=True)):
        if member is None or not task.seconds or not task.uses or task.uses[0][0] == ENGINE:  # type: ignore[index]
            continue
        number, keys, gates = member
        for rank, index in (key for key in keys if key[0] in ranks):
            one, start, end = composition.programs[number].ranks[rank][index], ran[place].start_seconds, place
            if one.op in (Op.SEND, Op.RECV):  # handed to the engine once what it waits for on its rank is done
                before = (*gates[rank], *(ends[number, (rank, each)] for each in one.after))
                start = max(ran[each].end_seconds for each in before)
            if one.op is Op.RECV:
                end = ends[number, (rank, index)]  # with its latency, and what it takes of the receiver's cores
            lane = COMMUNICATION if one.op in _WIRE else COMPUTATION
            yield Span(f"{names[number]}: {one.brief}", lane, start, ran[end].end_seconds, rank)


def _translated(composition: Composition, network: Network, clocks: Sequence[Clock]) -> list[Translated]:
    """Return the tasks of each program; those with one program and clock share a list."""
    alike: dict[tuple[int, int], Translated] = {}
    for program, clock in zip(composition.programs, clocks, strict=True):
        if (id(program), id(clock)) not in alike:
            values = clock.itemsize, clock.codec, clock.native_seconds, clock.overhead, clock.steps
            made = Translation(program, network, *values)
            alike[id(program), id(clock)] = list(zip(*made.tasks_and_keys(), strict=True))
    return [alike[id(program), id(clock)] for program, clock in zip(composition.programs, clocks, strict=True)]


def _resources(program: Program, task: Task, keys: Sequence[Key]) -> tuple[tuple[str, int], ...]:
    """Return what a task occupies: the engine's own collective both directions of all NICs, no processor."""
    rank, index = keys[0]
    if program.ranks[rank][index].op is Op.NATIVE:
        return tuple((way, each) for each, _ in keys for way in ("in", "out"))
    return task.uses  # type: ignore[return-value]  # a translation names resources so


def simulate_plan(plan: Plan, trace: Trace, ways: Sequence[Way], network: Network, lanes: int) -> Timeline:
    """Return the iteration that a plan takes in so many lanes, as rank 0 sees it: whole messages, and instructions.

    One bucket goes after the other where a codec's curves are not known, or all have too many instructions: what is
    predicted is then too long.
    """
    plan = plan.merged
    by_programs = lanes > 1 or _says_more_than_lines(plan, network)
    if not (by_programs and _fits(plan, trace, network)):
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
    timeline = simulate_composition(composition, network, moments, clocks, names, (0,))
    tasks, spans = computation(trace, ready)
    computed = [
        Span(name, lane, ran.start_seconds, ran.end_seconds)
        for (name, lane), ran in zip(spans, run_tasks(tasks), strict=True)
    ]
    return Timeline((*computed, *_whole_buckets(timeline.spans), *timeline.spans))


def timed_lanes(plan: Plan, trace: Trace, network: Network, lanes: int) -> int:
    """Return in how many lanes `simulate_plan` times a plan: in one where it cannot be timed by its programs."""
    return lanes if lanes == 1 or _fits(plan, trace, network) else 1


def _fits(plan: Plan, trace: Trace, network: Network) -> bool:
    return bool(_within([plan], trace, network, MOST_INSTRUCTIONS))


def _within(plans: Sequence[Plan], trace: Trace, network: Network, left: int) -> list[Plan]:
    """Return the plans, in order, that can be timed by their programs with so many instructions for all together."""
    found = []
    for plan in plans:
        count = _count(plan, trace, network, left) if _has_curves(plan, network) else left + 1
        if count <= left:
            found.append(plan)
            left -= count
    return found


def _count(plan: Plan, trace: Trace, network: Network, most: int) -> int:
    """Return how many instructions all programs of a plan have together; any number above `most` if more than that."""
    numel, found = {each.name: each.numel for each in trace.tensors}, 0
    for message in plan.messages:
        if found > most:  # a plan may have thousands of messages: counting them all takes longer than planning
            break
        found += instructions(network, plan.workers, message.route, [numel[name] for name in message.tensors])
    return found


def _says_more_than_lines(plan: Plan, network: Network) -> bool:
    """Say whether more than a line was measured of some bucket's route, so that programs tell what lines do not."""
    lines = (network.all_reduce.get(str(bucket.route)) for bucket in plan.buckets)
    return _has_curves(plan, network) and any(line is not None and line.least_seconds is not None for line in lines)


def _has_curves(plan: Plan, network: Network) -> bool:
    return all(bucket.codec is None or bucket.codec in network.codecs for bucket in plan.buckets)


def _whole_buckets(spans: Sequence[Span]) -> list[Span]:
    """Return each bucket from its first instruction to its last, as rank 0 sees it."""
    found: dict[str, list[Span]] = {}
    for span in spans:
        found.setdefault(bucket_of(span.name), []).append(span)
    return [
        Span(name, NETWORK_LANE, min(e.start_seconds for e in each), max(e.end_seconds for e in each))
        for name, each in found.items()
    ]


@dataclass(frozen=True, slots=True)
class InLanes:
    """What is chosen for lanes, each plan with the timeline that it has there."""

    plan: Plan
    rivals: tuple[Plan, ...]  # the closest ones that differ clearly
    lanes: int  # in how many they were timed
    left_out: int = 0  # plans that were not compared
    one_by_one: bool = False  # whether they were timed in one lane where more were asked for

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of how they were compared."""
        if self.one_by_one:
            why = "too many instructions to time them in lanes, or no curves of a codec"
            return (f"predicted as if one message followed the other: {why}",)
        if self.left_out:
            return (f"{self.left_out} plans were not compared: too many instructions to time them all in lanes",)
        return ()


def plans_in_lanes(
    plan: Plan,
    trace: Trace,
    ways: Sequence[Way],
    network: Network,
    lanes: int = LANES,
    slowdown: float = 1.0,
    tie: float = TIE,
    bulk: bool = False,
) -> InLanes:
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

    All are timed in the same way: by their programs while those have at most `MOST_INSTRUCTIONS` together, the finest
    plans are left out first; where the first has too many by itself, all as if one message followed the other.
    """
    if {bucket.route for bucket in plan.buckets} <= {Route("native")}:
        lanes = 1  # the engine's own all-reduces go one after the other
    plans = _choices(plan, trace, ways, lanes, bulk, cut=slowdown < MOST_SLOWDOWN)
    if plans == [plan] and lanes == 1:
        return InLanes(plan, (), 1)  # which is timed so already
    compared = _within(plans, trace, network, MOST_INSTRUCTIONS // (1 if slowdown == 1 else 2))  # some twice
    one_by_one = plans[0] not in compared
    simulated = _one_by_one if one_by_one else simulate_plan
    compared = plans if one_by_one else compared
    with without_collecting():
        timelines = [simulated(each, trace, ways, network, lanes) for each in compared]
        chosen, *rivals = _best([with_timeline(*each) for each in zip(compared, timelines, strict=True)], tie)
        if slowdown != 1:
            slowed = squeezed(trace, slowdown)
            found = [(each, simulated(each, slowed, ways, network, lanes)) for each in (chosen, *rivals)]
            chosen, *rivals = (with_timeline(each, stretched(timeline, slowdown)) for each, timeline in found)
    left_out, fewer = len(plans) - len(compared), one_by_one and lanes > 1
    return InLanes(chosen, tuple(rivals), 1 if fewer else lanes, left_out, fewer)


def _one_by_one(plan: Plan, trace: Trace, ways: Sequence[Way], network: Network, lanes: int) -> Timeline:
    """Return the iteration in which one message follows the other."""
    return simulate_iteration(trace, plan.messages, comparable(ways), overlap=plan.overlap)


def _best(plans: Sequence[Plan], tie: float) -> list[Plan]:
    """Return the plan to run, and its closest rivals."""
    chosen = fewest_messages(plans, tie)
    others = sorted((each for each in plans if each is not chosen), key=lambda each: each.iteration_seconds)
    close = [each for each in others if (1 - CLOSE) * each.iteration_seconds <= chosen.iteration_seconds]
    return [chosen, *_unlike(chosen, close)]


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
