"""Says in words what was decided and why."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from penstock.exchange.traffic import Sent
from penstock.plan import Plan
from penstock.planning.observed import Drift, communication_seconds
from penstock.planning.planning import Decision
from penstock.run_record import RouteUse
from penstock.timeline import Span, Timeline

KEPT_TIMES = 50  # iterations whose median `explain` reports
SLOWED = 1.1  # times as long as alone: two that share cores, not noise


def explain(
    decision: Decision | None,
    obstacle: str,
    profiled: int,
    wanted: int,
    measured_seconds: Sequence[float],
    drift: Drift,
    last: Timeline | None = None,
    used: Sequence[RouteUse] = (),
    first_buckets: str = "torch's own buckets",
    learnt: Decision | None = None,
    unmeasured: str = "",
) -> str:
    """Return a few lines: the plan, what it hides, what the other planners would have cost, predicted and measured.

    `used` is how the buckets of the last iteration really travelled, `first_buckets` what there is without a plan,
    `learnt` the decision with what its iterations have shown, `unmeasured` what `last` cannot say.
    """
    if obstacle:
        return "\n".join([f"{first_buckets} are kept: {obstacle}", *_used(used)])
    if decision is None:
        waiting = f"profiling: {profiled} of {wanted} iterations; until then {first_buckets} are used"
        return "\n".join([waiting, *_used(used)])
    return "\n".join(
        [
            *_summary(decision, measured_seconds, learnt),
            *_slowed(decision, last),
            *([unmeasured] if unmeasured else []),
            *_drift(drift),
            *_buckets(decision),
            *_used(used),
        ]
    )


def summary(decision: Decision) -> list[str]:
    """Return what was decided and what it is expected to give, in a few words each."""
    plan = decision.plan
    routes = ", ".join(sorted({str(bucket.route) for bucket in plan.buckets}))
    said = [f"plan {plan.hash} by {plan.planner}: {_messages(plan)} by {routes}"]
    said += [f"predicted iteration {_ms(plan.iteration_seconds)}"] if decision.trace is not None else []
    return said + ([decision.reason] if decision.reason else [])


def _summary(decision: Decision, measured_seconds: Sequence[float], learnt: Decision | None) -> Iterator[str]:
    plan = decision.plan
    routes = ", ".join(sorted({str(bucket.route) for bucket in plan.buckets}))
    yield f"plan {plan.hash} by {plan.planner}: {_messages(plan)} by {routes} on {plan.workers} workers"
    if decision.trace is not None:
        yield (
            f"predicted iteration {_ms(plan.iteration_seconds)}: {_ms(decision.trace.compute_seconds)} of computation, "
            f"{_ms(plan.non_overlapped_seconds)} of communication that it does not hide"
        )
    if decision.slowdown > 1:
        yield (
            f"this counts that messages take {decision.slowdown:.2f} times as long while gradients are computed: the "
            "same processor does both"
        )
    if measured_seconds:
        yield f"measured iteration {_ms(median(measured_seconds))} (median of {len(measured_seconds)})"
    if learnt is not None and learnt.slowdown > decision.slowdown:
        yield (
            f"so messages take {learnt.slowdown:.2f} times as long while gradients are computed: predicted iteration "
            f"{_ms(learnt.plan.iteration_seconds)} with that, which a next plan counts"
        )
    if decision.reason:
        yield decision.reason
    yield from decision.notes
    if decision.alternatives:
        yield _compared(decision)


def _messages(plan: Plan) -> str:
    """Return how many messages there are, and of how many buckets where some travel in bulks."""
    count = f"{len(plan.messages)} messages"
    return f"{count}, bulks of {len(plan.buckets)} buckets," if plan.bulks else count


def _compared(decision: Decision) -> str:
    """Say what every planner would take, all at the speed that messages have by themselves: what planners know."""
    taken = dict(decision.alternatives)
    own = taken.pop(decision.plan.planner)
    others = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in taken.items())
    if decision.slowdown > 1:
        return f"planners compared without that: {decision.plan.planner} {_ms(own)}, {others}"
    return f"other planners would take: {others}"


def _slowed(decision: Decision, last: Timeline | None) -> Iterator[str]:
    """Say where the last iteration took longer than the prediction has it: both may want the same cores.

    The network is measured while nothing computes. What messages take longer on hosts whose cores compute is counted
    as profiled iterations showed it (`observed.py`), and not at all where a trace was given.
    """
    if last is None or decision.trace is None or decision.plan.timeline is None:
        return
    computed, sent = decision.trace.compute_seconds, communication_seconds(decision.plan.timeline)
    if not computed or not sent:
        return
    computing, sending = last.compute_seconds / computed, communication_seconds(last) / sent
    if max(computing, sending) > SLOWED:
        yield (
            f"last iteration: computation took {computing:.2f} and communication {sending:.2f} times as long as "
            "predicted; where they share cores they slow each other down"
        )


def _drift(drift: Drift) -> Iterator[str]:
    if not drift.limit:
        yield "planning again when communication drifts: off"
        return
    yield f"planning again when communication drifts by {drift.limit:.0%}: on, {len(drift.history)} times so far"
    for event in drift.history:
        yield (
            f"  iteration {event.iteration}: communication took {_ms(event.measured_seconds)} where "
            f"{_ms(event.predicted_seconds)} was predicted; plan {event.plan_hash} since then"
        )


def _buckets(decision: Decision) -> Iterator[str]:
    plan = decision.plan
    for index, (bucket, count) in enumerate(zip(plan.messages, plan.bulks or (1,) * len(plan.buckets), strict=True)):
        of = f" in a bulk of {count} buckets" if count > 1 else ""
        yield f"  {index}: {len(bucket.tensors)} tensors{of}, {bucket.nbytes} bytes, {bucket.route}: {bucket.name}"


def of_queued(sent: Sequence[Sent]) -> str:
    """Say how an iteration is timed some of whose buckets were queued on a device; nothing where none was."""
    queued = sum(each.is_queued for each in sent)
    if not queued:
        return ""
    return (
        f"{queued} of {len(sent)} buckets were queued on the GPU: torch's events there time communication as a whole; "
        "single buckets and their instructions are not measured"
    )


def _used(used: Sequence[RouteUse]) -> Iterator[str]:
    """Say how the last iteration's buckets really travelled, route by route."""
    return (f"last iteration sent {each}" for each in used)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


COLUMNS = 72


def text_picture(timelines: Mapping[str, Timeline | None], columns: int = COLUMNS) -> list[str]:
    """Return a line per lane, of None nothing; each timeline is of one rank.

    Spans in turn are `#` and `=`, so that neighbours can be told apart.

    >>> spans = Span("f", "compute", 0.0, 0.5), Span("b", "compute", 0.5, 1.0), Span("a", "network", 0.75, 1.5)
    >>> print("\\n".join(text_picture({"predicted": Timeline(spans)}, 12)))
    predicted compute |####====    | 1000 ms
    predicted network |      ######| 1500 ms
    """
    known = {name: timeline for name, timeline in timelines.items() if timeline is not None}
    whole = max((timeline.iteration_seconds for timeline in known.values()), default=0.0)
    rows = [(f"{name} {lane}", spans) for name, timeline in known.items() for (_, lane), spans in timeline.rows.items()]
    width = max((len(label) for label, _ in rows), default=0)
    return [f"{label:<{width}} |{_bar(spans, whole, columns)}| {_end(spans)}" for label, spans in rows]


def _bar(spans: tuple[Span, ...], whole: float, columns: int) -> str:
    cells = [" "] * columns
    for mark, first, last in _cells(spans, whole, columns):
        cells[first:last] = mark * (last - first)
    return "".join(cells)


def _cells(spans: tuple[Span, ...], whole: float, columns: int) -> Iterator[tuple[str, int, int]]:
    scale = columns / whole if whole else 0.0
    for index, span in enumerate(spans):
        first = min(int(span.start_seconds * scale), columns - 1)
        yield "#="[index % 2], first, max(first + 1, min(round(span.end_seconds * scale), columns))


def _end(spans: tuple[Span, ...]) -> str:
    return f"{1e3 * max((span.end_seconds for span in spans), default=0.0):.4g} ms"
