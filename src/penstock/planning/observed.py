"""What iterations really took: timelines, drift from what the plan predicts, which of several plans is the fastest.

Also how much longer messages take while the same cores compute. The network is measured while nothing computes;
profiled iterations send torch's own buckets while they compute, and what is left to send after that says how far
messages came meanwhile. Let bucket i be ready at r_i, let it and all after it take S_i where nothing computes, and let
the backward pass end at T. With a slowdown of s messages last until max_i (T - (T - r_i) / s + S_i)
(`simulator/iteration.py`). They lasted until E: s is the least of (T - r_i) / (S_i - (E - T)): what bucket i and those
after it did of their S_i in the T - r_i before T.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import Any

from penstock.exchange.traffic import Sent
from penstock.network import LinearCost
from penstock.plan import Plan
from penstock.planning.agree import Ranks
from penstock.runtime.recorder import Recorder
from penstock.timeline import COMPUTE, Span, Timeline
from penstock.trace import Trace

ABOUT = 1.05  # times as long is as predicted
MOST = 4.0  # more is not sharing cores: ranks that wait for a slower one, or a hiccup


@dataclass(slots=True)
class Sending:
    """What profiled iterations sent while they computed, and when the last of it had arrived."""

    nbytes: tuple[int, ...] = ()  # of torch's buckets, in sending order
    ends: list[float] = field(default_factory=list)  # seconds, of each iteration that sent these

    def note(self, data: Mapping[str, Any], timeline: Timeline | None) -> None:
        """Take an iteration from torch's logging data; torch changes its buckets once, after the first."""
        nbytes = bucket_nbytes(data)
        if timeline is None or not nbytes:
            return
        if nbytes != self.nbytes:
            self.nbytes, self.ends = nbytes, []
        self.ends.append(timeline.iteration_seconds)

    def slowdown(self, trace: Trace, line: LinearCost | None) -> float:
        """Return how much longer messages take meanwhile; 1 where nothing is known, or nothing is in their way.

        `line` is what an all-reduce takes where nothing computes.
        """
        if line is None or not self.ends:
            return 1.0
        return message_slowdown(trace, self.nbytes, line, median(self.ends))


@dataclass(slots=True)
class Between:
    """What profiled iterations on a GPU took from the last message to the next forward pass: the optimizer's step.

    torch's clocks are read once the device has come to the end of the last message. From one such moment to the next it
    took a step, a forward and a backward pass and messages, of which the clocks say all but the step.
    """

    found: list[float] = field(default_factory=list)  # seconds
    before: float | None = None  # when the last message of the iteration before had arrived

    def note(self, timeline: Timeline | None, now_seconds: float) -> None:
        """Take an iteration whose last message has just arrived; None where torch has not timed it."""
        if timeline is not None and self.before is not None:
            self.found.append(now_seconds - self.before - timeline.iteration_seconds)
        self.before = None if timeline is None else now_seconds

    @property
    def seconds(self) -> float:
        """What an iteration takes so; 0 where nothing is known."""
        return max(0.0, median(self.found)) if self.found else 0.0


def bucket_nbytes(data: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the sizes of torch's buckets.

    >>> bucket_nbytes({"bucket_sizes": "30", "rebuilt_bucket_sizes": "10, 20"})
    (10, 20)
    """
    text = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
    return tuple(int(part) for part in text.split(",") if part.strip())


def message_slowdown(trace: Trace, nbytes: Sequence[int], line: LinearCost, end_seconds: float) -> float:
    """Return the slowdown with which buckets of `nbytes` have arrived at `end_seconds`, between 1 and `MOST`.

    It is 1 where that ends about as late: of messages that are covered anyway, a little noise would make anything.
    """
    computed, ready = trace.compute_seconds, _bucket_ready(trace, nbytes)
    rest = [*accumulate(line.seconds(each) for each in reversed(nbytes))][::-1]  # a bucket and all after it
    if end_seconds <= ABOUT * max(computed, *(r + s for r, s in zip(ready, rest, strict=True))):
        return 1.0
    done = [(computed - r, s - (end_seconds - computed)) for r, s in zip(ready, rest, strict=True)]
    found = min((time / part for time, part in done if part > 0), default=MOST)
    return min(max(1.0, found), MOST)


def _bucket_ready(trace: Trace, nbytes: Sequence[int]) -> list[float]:
    """Return when the last gradient of each bucket is ready; buckets hold tensors in the trace's order."""
    ends, ready = list(accumulate(trace.nbytes)), trace.ready_seconds
    return [ready[min(bisect_left(ends, end), len(ready) - 1)] for end in accumulate(nbytes)]


NETWORK = "network"
_NANO = 1e-9


def measured_timeline(
    data: Mapping[str, Any], sent: Sequence[Sent], origin_seconds: float, rank: int, notes: Recorder | None = None
) -> Timeline | None:
    """Return the iteration that `data`, torch's logging data, is about; None where torch has timed none yet.

    torch's reducer times the forward pass, the backward pass and the stretch from the first bucket that is sent to the
    last that arrives, on CUDA by events. What each bucket took is known where our communication thread sent it.
    `origin_seconds` is when its forward pass started, on the clock of `sent`. Instructions that `notes` holds stand in
    lanes of their own beside the buckets. Where buckets were queued on a device, the host's clock says nothing of
    them: there is one span for all buckets of the iteration, by torch's events on the device, and no instruction.
    """
    if "backward_compute_time" not in data:
        return None
    forward = data["forward_compute_time"] * _NANO  # to the start of the backward pass
    end = forward + data["backward_compute_time"] * _NANO
    spans = [Span("forward", COMPUTE, 0.0, forward, rank), Span("backward", COMPUTE, forward, end, rank)]
    if sent and not any(each.is_queued for each in sent):
        since = [(each.name, each.start_seconds - origin_seconds, each.end_seconds - origin_seconds) for each in sent]
        spans += [Span(name, NETWORK, max(start, 0.0), max(stop, 0.0), rank) for name, start, stop in since]
        spans += notes.timeline(origin_seconds).spans if notes is not None else ()
    else:
        start = max(0.0, end - data["backward_compute_comm_overlap_time"] * _NANO)
        spans.append(Span("all buckets", NETWORK, start, start + data["backward_comm_time"] * _NANO, rank))
    return Timeline(tuple(spans))


def communication_seconds(timeline: Timeline) -> float:
    """Return the time from the first message to the last arrival: predicted and measured alike."""
    spans = [span for span in timeline.spans if span.lane != COMPUTE]
    if not spans:
        return 0.0
    return max(span.end_seconds for span in spans) - min(span.start_seconds for span in spans)


WINDOW = 20  # iterations that are looked at together
LONGEST = 64  # windows between two plans, once planning again did not help


@dataclass(frozen=True, slots=True)
class Replanned:
    """One time that drift led to a new plan."""

    iteration: int  # since the first plan
    measured_seconds: float  # communication, median of a window
    predicted_seconds: float  # communication, by the plan in force until then
    plan_hash: str  # of the plan from then on


@dataclass(slots=True)
class Drift:
    """What rank 0 knows of the plan in force; the other ranks only count iterations.

    After a plan that drift led to, the next one needs twice as many windows: where a prediction is wrong for reasons
    that measuring again does not mend, measuring again and again would only cost time.
    """

    limit: float  # part of the prediction that the measured time may differ by
    predicted_seconds: float = 0.0
    iterations: int = 0  # since the first plan
    patience: int = 1  # windows to wait
    seen: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    history: list[Replanned] = field(default_factory=list)

    def note(self, communication_seconds: float | None) -> None:
        """Take one iteration's communication; None where it was not measured."""
        self.iterations += 1
        if communication_seconds is not None:
            self.seen.append(communication_seconds)

    @property
    def is_due(self) -> bool:
        """Is it time to ask rank 0? The same on all ranks."""
        return self.iterations > 0 and self.iterations % (WINDOW * self.patience) == 0

    @property
    def drifted(self) -> bool:
        """Has the communication of the last iterations drifted from the plan's?"""
        if len(self.seen) < WINDOW // 2:
            return False
        return abs(median(self.seen) - self.predicted_seconds) > self.limit * self.predicted_seconds

    def asks_for_a_plan(self, timeline: Timeline | None, ranks: Ranks) -> bool:
        """Note an iteration, on rank 0 as it was measured; say whether to plan again, on all ranks as rank 0 does."""
        self.note(None if timeline is None else communication_seconds(timeline))
        return self.is_due and bool(ranks.from_first(self.drifted, "asking rank 0 whether to plan again"))

    def replanned(self, plan_hash: str, predicted_seconds: float) -> None:
        """Begin again with a new plan."""
        measured = median(self.seen) if self.seen else 0.0
        self.history.append(Replanned(self.iterations, measured, self.predicted_seconds, plan_hash))
        self.patience = min(2 * self.patience, LONGEST)
        self.predicted_seconds = predicted_seconds
        self.seen.clear()


TURNS, SKIPPED, COUNTED = 2, 1, 4  # of each plan in a race; iterations of a turn that are not counted, and that are


@dataclass(slots=True)
class Race:
    """Finds the fastest of a few plans by iterations of training; all ranks count alike, rank 0's times decide.

    Plans that are predicted to take about the same time differ in what no prediction knows. Each has two turns, so that
    a machine that is busy for a while spoils one turn, not a plan.

        plans a, b   |a a a a a|b b b b b|a a a a a|b b b b b|  then the better; the first of each turn is not counted
    """

    plans: tuple[Plan, ...]  # the one in force first
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by the plans' hashes, of counted iterations
    iterations: int = 0  # so far

    @property
    def current(self) -> Plan:
        """The plan whose turn it is."""
        return self.plans[self.iterations // (SKIPPED + COUNTED) % len(self.plans)]

    @property
    def is_over(self) -> bool:
        """Whether each plan has had its turns."""
        return self.iterations >= TURNS * len(self.plans) * (SKIPPED + COUNTED)

    def note(self, seconds: float) -> None:
        """Take what an iteration of the current plan took."""
        if self.iterations % (SKIPPED + COUNTED) >= SKIPPED:
            self.seconds.setdefault(self.current.hash, []).append(seconds)
        self.iterations += 1

    @property
    def fastest(self) -> int:
        """The number of the plan whose iterations took the least; the best half of them counts, as others only add."""
        return min(range(len(self.plans)), key=lambda number: self.typical(self.plans[number]))

    def typical(self, plan: Plan) -> float:
        """Return the median of the quicker half of a plan's iterations."""
        taken = sorted(self.seconds[plan.hash])
        return median(taken[: -(-len(taken) // 2)])

    def said(self) -> str:
        """Return what was raced and what each took, in a sentence; before that, how far it is."""
        if not self.is_over:
            wanted = TURNS * len(self.plans) * (SKIPPED + COUNTED)
            return f"racing {len(self.plans)} plans: {self.iterations} of {wanted} iterations"
        each = "; ".join(
            f"{plan.hash} ({len(plan.messages)} messages, predicted {1e3 * plan.iteration_seconds:.4g} ms) "
            f"{1e3 * self.typical(plan):.4g} ms"
            for plan in self.plans
        )
        return f"raced {len(self.plans)} plans for {self.iterations} iterations: {each}; the fastest is kept"
