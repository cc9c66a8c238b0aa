"""Replays training iterations: real communication, computation replaced by waiting as long as the trace says.

Waiting costs no processor time, so 8 or 16 ranks fit on two cores, and a GPU's step can be studied on machines without
one. Deadlines are absolute, counted from the start of the iteration: lateness of one tensor does not delay the next.
Buckets are averaged by the `Exchange` that training uses, in lanes, with its codecs and error feedback: that does cost
processor time, and all ranks of this machine share its cores. `replay_plans` replays several plans in turn on the same
network and compares each with its simulation.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from statistics import median
from time import process_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.cost.ways import way_for
from penstock.exchange.arrays import Device, NumpyArrays
from penstock.exchange.exchange import Exchange
from penstock.exchange.parameter_state import Memory
from penstock.network import Network
from penstock.plan import Plan
from penstock.program.composition import LANES
from penstock.runtime.communicator import Communicator
from penstock.runtime.timed import gathered, largest
from penstock.simulator.composition import simulate_plan, timed_lanes
from penstock.simulator.fitted import fitted_cost
from penstock.timeline import COMPUTE, Span, Timeline
from penstock.trace import Trace

# 2 bytes are 2 bytes
_DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": np.float16}
_NOISE = 1 << 20  # elements; gradients repeat after so many
_MEASUREMENTS = 3  # of the network, while plans are replayed


@dataclass(frozen=True, slots=True)
class Replayed:
    """One replayed iteration as this rank saw it."""

    timeline: Timeline
    lateness_seconds: float  # how much later than the trace says the backward pass ended
    core_seconds: float  # that this rank's process took of the cores

    @property
    def iteration_seconds(self) -> float:
        """From the start of the forward pass to the end of the last bucket."""
        return self.timeline.iteration_seconds


class Gradients:
    """The memory of one rank's gradients, and of what codecs have not sent; plans of the same trace share it."""

    def __init__(self, trace: Trace) -> None:
        numel = sum(tensor.numel for tensor in trace.tensors)
        self.values = np.zeros(numel, _DTYPES[trace.dtype])

    @cached_property
    def residual(self) -> NDArray[np.float32]:
        """What codecs have not sent; made when the first compressed bucket comes."""
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


class _SharedResidual(NumpyArrays):
    """Gives the residuals of one plan's buckets memory that all plans of a trace share.

    Each plan has its own pieces of what is put off: so an iteration does what one of a steady training run does, on
    values that mean nothing.
    """

    def __init__(self, gradients: Gradients) -> None:
        self._gradients, self._used = gradients, 0

    def zeros(self, numel: int, device: Device) -> NDArray[np.float32]:
        """Return the next elements; an exchange asks once for each bucket, one lane at a time."""
        start, self._used = self._used, self._used + numel
        assert self._used <= self._gradients.residual.size, "a plan has one residual for each element"
        return self._gradients.residual[start : self._used]


class Replay:
    """Replays iterations of one plan, in lanes as training runs it; buffers and threads are made once."""

    def __init__(
        self,
        trace: Trace,
        plan: Plan,
        communicator: Communicator,
        gradients: Gradients | None = None,
        lanes: int = LANES,
    ) -> None:
        plan.check_against(trace)
        plan = plan.merged
        self._trace, self._plan, self._communicator = trace, plan, communicator
        self.gradients = gradients or Gradients(trace)
        self.compresses = any(bucket.codec is not None for bucket in plan.buckets)
        self._exchange = Exchange(communicator, memory=Memory(arrays=_SharedResidual(self.gradients)), lanes=lanes)
        self._exchange.follow(plan)
        numel, dtype = {tensor.name: tensor.numel for tensor in trace.tensors}, str(self.gradients.values.dtype)
        sizes = [[numel[name] for name in bucket.tensors] for bucket in plan.buckets]
        ends = accumulate(map(sum, sizes), initial=0)
        places = (self.gradients.values[start : start + sum(each)] for start, each in zip(ends, sizes, strict=False))
        self._after = {  # by the last tensor of each bucket
            bucket.tensors[-1]: (self._exchange.bucket(bucket.tensors, each, dtype), values)
            for bucket, each, values in zip(plan.buckets, sizes, places, strict=True)
        }

    def run(self, start_together: Callable[[], object] = lambda: None, record: bool = False) -> Replayed:
        """Replay one iteration; every rank must start it at about the same time.

        Making gradients takes processors that all ranks share: who is ready calls `start_together`, and the clock
        starts when that returns. With `record`, the timeline has each instruction, which takes a little longer.
        """
        rank, exchange, spans, started = self._communicator.transport.rank, self._exchange, list[Span](), []
        exchange.record(record)
        exchange.begin()
        if self.compresses:
            self.gradients.renew()
        start_together()
        start, used = time.perf_counter(), process_time()
        _wait_until(start + self._trace.forward_seconds)
        spans.append(Span("forward", COMPUTE, 0.0, time.perf_counter() - start, rank))
        for tensor, ready in zip(self._trace.tensors, self._trace.ready_seconds, strict=True):
            _wait_until(start + ready)
            spans.append(Span(tensor.name, COMPUTE, spans[-1].end_seconds, time.perf_counter() - start, rank))
            if tensor.name in self._after:
                started.append(exchange.start(*self._after[tensor.name]))
        lateness = spans[-1].end_seconds - self._trace.compute_seconds
        exchange.finish()
        for handle in started:
            exchange.wait(handle)
        used = process_time() - used
        found = {sent.name: sent for sent in exchange.sent}
        for bucket in self._plan.buckets:
            sent = found[bucket.name]
            spans.append(Span(bucket.name, "network", sent.start_seconds - start, sent.end_seconds - start, rank))
        recorder = self._communicator.recorder
        spans += recorder.timeline(start).spans if recorder is not None else ()
        exchange.record(False)
        return Replayed(Timeline(tuple(spans)), lateness, used)

    def close(self) -> None:
        """End the communication threads."""
        self._exchange.close()


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
    core_seconds: float = 0.0  # what an iteration takes of the cores, of one rank's process, on average
    simulated_lanes: int = LANES  # fewer than were run where the simulator could not time as many
    network: int = 0  # which of the networks that were measured meanwhile gives the median simulation
    turns: tuple[float, ...] = ()  # seconds of each iteration; every plan has one in each turn

    @property
    def error(self) -> float:
        """How far the simulation is off, relative to what was measured."""
        return self.simulated_seconds / self.measured_seconds - 1

    def document(self) -> dict[str, Any]:
        """Return the row for `--json`, without its turns."""
        return {name: value for name, value in asdict(self).items() if name != "turns"} | {"error": self.error}


def replay_plans(
    trace: Trace,
    plans: Mapping[str, Plan],
    network: Network,
    communicator: Communicator,
    iterations: int,
    done: Callable[[], None] = lambda: None,
    lanes: Mapping[str, int] | None = None,  # of each plan, where it is to have fewer than all
    measure_again: Callable[[], Network] | None = None,
    record: bool = True,
) -> tuple[list[ReplayRow], dict[str, tuple[Timeline, Timeline]]]:
    """Replay every plan `iterations` times, in turn; return rows, and each plan's (simulated, measured) timelines.

    Every rank must call this with the same arguments. The first iteration of each plan warms up and is not counted; nor
    is a second one of those that compress, as the memory they share had its final size only after the first of all.
    The measured timeline is that of one more iteration, as noting each instruction takes time; without `record` there
    are no timelines.

    A machine that others share is not as fast in one minute as in the next. With `measure_again` the network is
    measured three times, between iterations and after them, and a plan is simulated on each: the median counts.
    """
    gradients, wanted = Gradients(trace), lanes or {}
    communicator.network = network
    replays = {
        name: Replay(trace, plan, communicator, gradients, wanted.get(name, LANES)) for name, plan in plans.items()
    }
    runs: dict[str, list[Replayed]] = {name: [] for name in plans}
    slowest: dict[str, list[float]] = {name: [] for name in plans}
    cores: dict[str, list[float]] = {name: [] for name in plans}
    networks, between = list[Network](), -(-iterations // _MEASUREMENTS)
    start_together = partial(largest, communicator.transport, 0.0, communicator.timeout_seconds)
    try:
        _warm_up(list(replays.values()), start_together, done)
        names = list(replays)
        for turn in range(iterations):
            first = turn % max(1, len(names))  # every plan is the first in its turn
            for name in names[first:] + names[:first]:
                runs[name].append(found := replays[name].run(start_together))
                cores[name].append(float(gathered(communicator.transport, found.core_seconds).mean()))
                seconds = found.iteration_seconds
                slowest[name].append(largest(communicator.transport, seconds, communicator.timeout_seconds))
                done()
            if measure_again is not None and ((turn + 1) % between == 0 or turn + 1 == iterations):
                networks.append(measure_again())
        recorded = {name: each.run(start_together, record=True).timeline for name, each in replays.items() if record}
    finally:
        for replay in replays.values():
            replay.close()
    simulated = {
        name: _simulate(trace, plan, networks or [network], wanted.get(name, LANES)) for name, plan in plans.items()
    }
    timed = {name: timed_lanes(plan, trace, network, wanted.get(name, LANES)) for name, plan in plans.items()}
    rows = [
        replace(
            _row(trace, plans[name], runs[name], slowest[name], simulated[name][1]),
            core_seconds=median(cores[name]),
            simulated_lanes=timed[name],
            network=simulated[name][0],
            turns=tuple(slowest[name]),
        )
        for name in plans
    ]
    return rows, {name: (simulated[name][1], timeline) for name, timeline in recorded.items()}


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


def _simulate(trace: Trace, plan: Plan, networks: Sequence[Network], lanes: int) -> tuple[int, Timeline]:
    """Return the timeline that a plan has on these networks, that of the median length, and which network that is."""
    routes = dict.fromkeys(bucket.route for bucket in plan.buckets)
    found = (
        simulate_plan(plan, trace, [way_for(each, route, None, fitted_cost) for route in routes], each, lanes)
        for each in networks
    )
    return sorted(enumerate(found), key=lambda each: each[1].iteration_seconds)[len(networks) // 2]
