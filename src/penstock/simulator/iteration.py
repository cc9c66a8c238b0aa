"""Executes one training iteration in simulated time and returns its timeline.

The forward pass and then each tensor's backward computation run on the compute lane; a bucket is sent when its last
gradient is ready and the buckets before it have left. With parameter servers a bucket is pushed, then pulled, and the
push of the next bucket overlaps the pull of this one. Where a way is coupled, the second stage of a bucket is sent with
the first of the next one that goes so, or by itself at the end.

Messages that share their cores with computation take `slowdown` times as long while gradients are computed. A message
has a clock of its own, on which it takes as long as where nothing computes. With T the end of the backward pass and s
the slowdown, that clock shows T - (T - t) / s at a moment t before T, and t from then on. It is the same for all
messages, so an iteration with a slowdown is one without on this clock, translated back. An iteration never ends before
T, from where the clocks agree: its length needs no translation.

    s = 2; gradients ready at 2 and 4 (T = 4), each a message of 2 s

    messages' clock        a at 3:  |a a|b b|        to 7
    the common clock       a at 2:  |a a a|b b|      to 7: a's first second takes two, its next is after T
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.cost.ways import NETWORK_LANE, Way, comparable
from penstock.errors import PlanError
from penstock.plan import Bucket, Plan, Route
from penstock.planners import PLANNERS, Planner
from penstock.simulator.engine import Task, run_tasks
from penstock.timeline import COMPUTE, Span, Timeline
from penstock.trace import Tensor, Trace


def simulate_iteration(
    trace: Trace,
    buckets: Sequence[Bucket],
    ways: Sequence[Way],
    *,
    overlap: bool = True,
    ready_seconds: Sequence[float] | None = None,
) -> Timeline:
    """Run one iteration of `trace` with `buckets`, each sent by the way of its route.

    `ready_seconds` replaces the trace's ready times: with stragglers, when the slowest worker's gradient is ready.
    """
    by_route = {way.route: way for way in comparable(ways)}
    ready = trace.ready_seconds if ready_seconds is None else tuple(ready_seconds)
    tasks, spans = computation(trace, ready)
    last_of = last_tensors(trace, buckets)
    free: dict[str, int] = {}  # the latest task of each lane
    second: tuple[str, float, float] | None = None  # of a coupled bucket: its name, what is left, and its startup

    def add(name: str, lane: str, seconds: float, after: int) -> int:
        before = (free[lane],) if lane in free else ()
        tasks.append(Task(seconds, (lane,), (after, *before)))
        spans.append((name, lane))
        free[lane] = len(tasks) - 1
        return free[lane]

    for bucket, last in zip(buckets, last_of, strict=True):
        way = way_of(by_route, bucket)
        after = len(ready) if not overlap else last + 1  # task 0 is the forward pass
        if way.coupled:
            if second is not None:
                add(second[0], NETWORK_LANE, second[1], after)
            own, left = way.coupled_seconds(bucket.nbytes, len(bucket.tensors))
            add(bucket.name, NETWORK_LANE, own, after)
            second = bucket.name, left, way.stages[1].a_seconds
            continue
        taken = way.stage_seconds(bucket.nbytes, len(bucket.tensors))
        for seconds, lane in zip(taken, way.lanes, strict=True):
            after = add(bucket.name, lane, seconds, after)
    if second is not None:
        add(second[0], NETWORK_LANE, second[1] + second[2], 0)
    ran = run_tasks(tasks)
    return Timeline(
        tuple(Span(name, lane, r.start_seconds, r.end_seconds) for (name, lane), r in zip(spans, ran, strict=True))
    )


def computation(trace: Trace, ready: Sequence[float]) -> tuple[list[Task], list[tuple[str, str]]]:
    """Return the forward pass and each backward step as tasks that end exactly at their ready times."""
    starts = [
        ready[0] - trace.tensors[0].backward_seconds,
        *ready,
    ]  # what precedes the first tensor is the forward pass
    starts[0] = max(0.0, starts[0])
    tasks = [Task(starts[0], (COMPUTE,))]
    spans = [("forward", COMPUTE)]
    for index, tensor in enumerate(trace.tensors):
        tasks.append(Task(max(0.0, ready[index] - starts[index]), (COMPUTE,), (index,)))
        spans.append((tensor.name, COMPUTE))
    return tasks, spans


def last_tensors(trace: Trace, buckets: Sequence[Bucket]) -> list[int]:
    """Return the index in the trace of the tensor of each bucket that is ready last."""
    index_of = {tensor.name: index for index, tensor in enumerate(trace.tensors)}
    try:
        return [max(index_of[name] for name in bucket.tensors) for bucket in buckets]
    except KeyError as error:
        raise PlanError(f"plan holds tensor {error.args[0]!r}, which trace {trace.model!r} does not have") from error


def way_of(ways: Mapping[Route, Way], bucket: Bucket) -> Way:
    """Return how a bucket travels; raise where its route is not among the ways."""
    if bucket.route not in ways:
        known = ", ".join(str(route) for route in ways)
        raise PlanError(f"bucket {bucket.name!r} wants strategy {str(bucket.route)!r}; known here: {known}")
    return ways[bucket.route]


def predict(trace: Trace, planner: Planner, ways: Sequence[Way], workers: int, slowdown: float = 1.0) -> Plan:
    """Let `planner` plan `trace` and return the plan with its predicted timeline.

    While gradients are computed, messages take `slowdown` times as long as `ways` say (see above). That is
    timed, and not planned with: plans made with it merged more, and were measured to be slower.
    """
    buckets = planner.buckets(trace, ways)
    plan = Plan(trace.model, workers, planner.name, buckets, overlap=planner.overlap, times=trace.times)
    return timed(plan, trace, ways, slowdown)


def timed(plan: Plan, trace: Trace, ways: Sequence[Way], slowdown: float = 1.0) -> Plan:
    """Return the plan with the timeline that `trace` and `ways` predict, where messages are slowed as in `predict`."""
    timeline = simulate_iteration(squeezed(trace, slowdown), plan.messages, ways, overlap=plan.overlap)
    return with_timeline(plan, stretched(timeline, slowdown))


def with_timeline(plan: Plan, timeline: Timeline) -> Plan:
    """Return the plan with a predicted timeline, and with the times that it says."""
    return replace(
        plan,
        timeline=timeline,
        iteration_seconds=timeline.iteration_seconds,
        non_overlapped_seconds=timeline.non_overlapped_seconds,
    )


TIE = 0.05  # of a predicted iteration: predictions that differ by less do not say which plan is faster


def fewest_messages(plans: Sequence[Plan], tie: float = TIE) -> Plan:
    """Return the plan with the fewest messages among those predicted within `tie` of the best; of these, the shortest.

    Every message takes processor time, which is predicted where routes were measured with it, and otherwise is not:
    13 messages that were predicted to save 4% took 10% longer than 3 (VGG-16, 4 hosts, two cores).
    """
    best = min(plan.iteration_seconds for plan in plans)
    close = [plan for plan in plans if (1 - tie) * plan.iteration_seconds <= best]
    return min(close, key=lambda plan: (len(plan.messages), plan.iteration_seconds))


def predict_robust(trace: Trace, planner: Planner, ways: Sequence[Way], workers: int, slowdown: float = 1.0) -> Plan:
    """Return the plan with the fewest messages among those predicted within `TIE` of the best.

    Besides what `planner` finds, one message by each way, and the planner's choice with each way by itself, are
    considered.
    """
    one = replace(planner, buckets=PLANNERS["single"].buckets)  # under the same name
    others = [predict(trace, each, [way], workers, slowdown) for way in ways for each in (one, planner)]
    return fewest_messages([predict(trace, planner, ways, workers, slowdown), *others])


def squeezed(trace: Trace, slowdown: float) -> Trace:
    """Return the trace on the messages' clock: the backward pass is shorter, its end stays where it is."""
    assert slowdown >= 1
    if slowdown == 1:
        return trace
    tensors = tuple(Tensor(each.name, each.numel, each.backward_seconds / slowdown) for each in trace.tensors)
    later = trace.backward_seconds * (1 - 1 / slowdown)
    return replace(trace, forward_seconds=trace.forward_seconds + later, tensors=tensors)


def stretched(timeline: Timeline, slowdown: float) -> Timeline:
    """Return a timeline of the messages' clock on the common clock."""
    if slowdown == 1:
        return timeline
    end = timeline.compute_seconds

    def moment(seconds: float) -> float:
        """The forward pass begins at 0 on either clock; nothing else was before it."""
        return seconds if seconds >= end else max(0.0, end - (end - seconds) * slowdown)

    return Timeline(
        tuple(_moved(span, moment(span.start_seconds), moment(span.end_seconds)) for span in timeline.spans)
    )


def _moved(span: Span, start_seconds: float, end_seconds: float) -> Span:
    return replace(span, start_seconds=start_seconds, end_seconds=end_seconds)
