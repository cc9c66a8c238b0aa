"""Replays training iterations: real communication, computation replaced by waiting as long as the trace says.

Waiting costs no processor time, so 8 or 16 ranks fit on two cores, and a GPU's step can be studied on machines without
one. Deadlines are absolute, counted from the start of the iteration: lateness of one tensor does not delay the next.
Compressed buckets are compressed for real, tensor by tensor, with error feedback: that does cost processor time, and
all ranks of this machine share its cores. `replay_plans` replays several plans in turn on the same network and compares
each with its simulation.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import accumulate
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.codecs.codec import Codec
from penstock.codecs.feedback import PutOff
from penstock.codecs.registry import make_codec
from penstock.cost.ways import way_for
from penstock.network import Network
from penstock.plan import Plan
from penstock.program.composition import LANES, deal
from penstock.runtime.communicator import Communicator
from penstock.runtime.recorder import Recorder
from penstock.runtime.timed import largest
from penstock.simulator.composition import simulate_plan
from penstock.simulator.fitted import fitted_cost
from penstock.timeline import COMPUTE, Span, Timeline
from penstock.trace import Trace

# 2 bytes are 2 bytes
_DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": np.float16}
_NOISE = 1 << 20  # elements; gradients repeat after so many


@dataclass(frozen=True, slots=True)
class Replayed:
    """One replayed iteration as this rank saw it."""

    timeline: Timeline
    lateness_seconds: float  # how much later than the trace says the backward pass ended

    @property
    def iteration_seconds(self) -> float:
        """From the start of the forward pass to the end of the last bucket."""
        return self.timeline.iteration_seconds


class Gradients:
    """The memory of one rank's gradients, and of what codecs have not sent; plans of the same trace share it."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        numel = sum(tensor.numel for tensor in trace.tensors)
        self.values = np.zeros(numel, _DTYPES[trace.dtype])
        self._codecs: dict[str, Codec] = {}

    @cached_property
    def residual(self) -> NDArray[np.float32]:
        """What codecs have not sent, aligned with the values; made when the first compressed bucket comes."""
        return np.zeros(self.values.size, np.float32)

    @cached_property
    def _noise(self) -> NDArray[Any]:
        return np.random.default_rng(0).standard_normal(_NOISE, np.float32).astype(self.values.dtype)

    def renew(self) -> None:
        """Make the gradients anew: a codec takes its time from the values, and sums of sums would overflow.

        So would the residuals of plans that share one: each plan would send what another has sent and not taken off.
        """
        self.residual.fill(0.0)
        for start in range(0, self.values.size, _NOISE):
            part = self.values[start : start + _NOISE]
            part[:] = self._noise[: part.size]

    def codec(self, spec: str) -> Codec:
        """Return the codec of a plan; made once."""
        if spec not in self._codecs:
            self._codecs[spec] = make_codec(spec)
        return self._codecs[spec]


class Replay:
    """Replays iterations of one plan, in lanes as training runs it; buffers and threads are made once."""

    def __init__(
        self,
        trace: Trace,
        plan: Plan,
        communicator: Communicator,
        gradients: Gradients | None = None,
        lanes: Sequence[Communicator] | None = None,  # of the communicator, where several replays share them
    ) -> None:
        plan.check_against(trace)
        plan = plan.merged
        self._trace, self._plan, self._communicator = trace, plan, communicator
        self._lanes = communicator.lanes(LANES) if lanes is None else lanes
        self._lane_of = deal([bucket.strategy == "native" for bucket in plan.buckets], len(self._lanes))
        self.gradients = gradients or Gradients(trace)
        self.compresses = any(bucket.codec is not None for bucket in plan.buckets)
        self._threads = [ThreadPoolExecutor(1, f"penstock-replay-{lane}") for lane, _ in enumerate(self._lanes)]
        self._places = list(_places(trace, plan))
        index_of = {tensor.name: index for index, tensor in enumerate(trace.tensors)}
        self._kept = [self._residual(number) for number in range(len(plan.buckets))]
        self._codecs = [
            None if bucket.codec is None else self.gradients.codec(bucket.codec).for_bucket(number)
            for number, bucket in enumerate(plan.buckets)
        ]
        self._bucket_after = {index_of[bucket.tensors[-1]]: number for number, bucket in enumerate(plan.buckets)}

    def run(self, start_together: Callable[[], object] = lambda: None) -> Replayed:
        """Replay one iteration; every rank must start it at about the same time.

        Making gradients takes processors that all ranks share: who is ready calls `start_together`, and the clock
        starts when that returns.
        """
        spans: list[Span] = []
        sent: list[Future[Span]] = []
        self._communicator.recorder = recorder = Recorder()
        if self.compresses:
            self.gradients.renew()
        start_together()
        start = time.perf_counter()
        _wait_until(start + self._trace.forward_seconds)
        spans.append(Span("forward", COMPUTE, 0.0, time.perf_counter() - start, self._communicator.transport.rank))
        for index, (tensor, ready) in enumerate(zip(self._trace.tensors, self._trace.ready_seconds, strict=True)):
            _wait_until(start + ready)
            spans.append(Span(tensor.name, COMPUTE, spans[-1].end_seconds, time.perf_counter() - start, spans[0].rank))
            if self._plan.overlap and index in self._bucket_after:
                sent.append(self._send(self._bucket_after[index], start))
        lateness = spans[-1].end_seconds - self._trace.compute_seconds
        if not self._plan.overlap:
            sent = [self._send(number, start) for number in range(len(self._plan.buckets))]
        spans.extend(future.result() for future in sent)
        self._communicator.recorder = None
        return Replayed(Timeline((*spans, *recorder.timeline(start).spans)), lateness)

    def close(self) -> None:
        """End the communication threads."""
        for thread in self._threads:
            thread.shutdown()

    def _send(self, number: int, start: float) -> "Future[Span]":
        return self._threads[self._lane_of[number]].submit(self._reduce, number, start)

    def _reduce(self, number: int, start: float) -> Span:
        bucket, communicator = self._plan.buckets[number], self._lanes[self._lane_of[number]]
        if communicator.recorder is not None:
            communicator.recorder.name(bucket.name)
        first, bounds = self._places[number]
        values = self.gradients.values[first : first + bounds[-1]]
        begin = time.perf_counter() - start
        codec = self._codecs[number]
        if codec is None:
            communicator.all_reduce(values, bucket.strategy, **bucket.route.options)
        else:
            communicator.all_reduce(values, bucket.strategy, codec, self._kept[number], bounds, **bucket.route.options)
        return Span(bucket.name, "network", begin, time.perf_counter() - start, communicator.transport.rank)

    def _residual(self, number: int) -> PutOff | None:
        """Return where a bucket's codec keeps what it does not send, as training has it: put off.

        Plans share the memory, and each has its own pieces of what is put off: so an iteration does what one of a
        steady training run does, on values that mean nothing.
        """
        if self._plan.buckets[number].codec is None:
            return None
        first, bounds = self._places[number]
        return PutOff(self.gradients.residual[first : first + bounds[-1]])


def _places(trace: Trace, plan: Plan) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield where each bucket begins, and where in it each tensor begins and the last one ends, in elements."""
    numel = {tensor.name: tensor.numel for tensor in trace.tensors}
    first = 0
    for bucket in plan.buckets:
        bounds = tuple(accumulate((numel[name] for name in bucket.tensors), initial=0))
        yield first, bounds
        first += bounds[-1]


def _wait_until(deadline: float) -> None:
    """Sleep until `deadline` of `perf_counter`; the kernel wakes us within about 0.1 ms."""
    while (left := deadline - time.perf_counter()) > 0:
        time.sleep(left)


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """One plan, replayed and simulated."""

    planner: str
    messages: int
    measured_seconds: float  # median over iterations of the slowest rank
    spread: float  # maximum - minimum over iterations
    simulated_seconds: float
    lateness: float  # median over iterations of how much the replayed computation took too long, relative

    @property
    def error(self) -> float:
        """How far the simulation is off, relative to what was measured."""
        return self.simulated_seconds / self.measured_seconds - 1

    def document(self) -> dict[str, Any]:
        """Return the row for `--json`."""
        return asdict(self) | {"error": self.error}


def replay_plans(
    trace: Trace,
    plans: Mapping[str, Plan],
    network: Network,
    communicator: Communicator,
    iterations: int,
    done: Callable[[], None] = lambda: None,
    lanes: Mapping[str, int] | None = None,  # of each plan, where it is to have fewer than all
) -> tuple[list[ReplayRow], dict[str, tuple[Timeline, Timeline]]]:
    """Replay every plan `iterations` times, in turn; return rows, and each plan's (simulated, measured) timelines.

    Every rank must call this with the same arguments. The first iteration of each plan warms up and is not counted; nor
    is a second one of those that compress, as the memory they share had its final size only after the first of all.
    """
    gradients = Gradients(trace)
    every, wanted = communicator.lanes(LANES), lanes or {}
    shared = {name: every[: wanted.get(name, LANES)] for name in plans}
    replays = {name: Replay(trace, plan, communicator, gradients, shared[name]) for name, plan in plans.items()}
    runs: dict[str, list[Replayed]] = {name: [] for name in plans}
    slowest: dict[str, list[float]] = {name: [] for name in plans}
    start_together = partial(largest, communicator.transport, 0.0, communicator.timeout_seconds)
    try:
        _warm_up(list(replays.values()), start_together, done)
        names = list(replays)
        for turn in range(iterations):
            first = turn % max(1, len(names))  # every plan is the first in its turn
            for name in names[first:] + names[:first]:
                runs[name].append(replays[name].run(start_together))
                seconds = runs[name][-1].iteration_seconds
                slowest[name].append(largest(communicator.transport, seconds, communicator.timeout_seconds))
                done()
    finally:
        for replay in replays.values():
            replay.close()
    simulated = {name: _simulate(trace, plan, network, len(shared[name])) for name, plan in plans.items()}
    rows = [_row(trace, plans[name], runs[name], slowest[name], simulated[name]) for name in plans]
    return rows, {name: (simulated[name], runs[name][-1].timeline) for name in plans}


def _warm_up(replays: list[Replay], start_together: Callable[[], object], done: Callable[[], None]) -> None:
    for replay in replays:
        replay.run(start_together)
        done()
    for replay in replays:
        if replay.compresses:
            replay.run(start_together)


def _row(trace: Trace, plan: Plan, runs: list[Replayed], slowest: list[float], simulated: Timeline) -> ReplayRow:
    lateness = median(run.lateness_seconds for run in runs) / trace.compute_seconds if trace.compute_seconds else 0.0
    spread = max(slowest) - min(slowest)
    return ReplayRow(plan.planner, len(plan.messages), median(slowest), spread, simulated.iteration_seconds, lateness)


def _simulate(trace: Trace, plan: Plan, network: Network, lanes: int) -> Timeline:
    ways = [
        way_for(network, route, None, fitted_cost) for route in dict.fromkeys(bucket.route for bucket in plan.buckets)
    ]
    return simulate_plan(plan, trace, ways, network, lanes)
