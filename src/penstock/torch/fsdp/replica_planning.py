"""Plans the messages between replicas while a sharded model trains: profile, measure, plan, and watch what comes of it.

What a plan calls a tensor is here a group of parameters: what one reduce-scatter of torch's gives. A plan says which
groups travel together, and how. The first iterations note when each group comes, and send it by itself, by the engine's
own all-reduce, when the pass has computed everything: messages would take cores, or the device, from what is timed
(GPT-2 on 2 x 2 ranks of one H200, 10 Gb/s: 355 ms for 160). On a CPU the last of them sends at once, which shows how
much longer messages take while the cores compute. Then all replicas of each shard measure the network at the same
time, as they use it in training; the first rank of the mesh decides, and all ranks follow it.
"""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from penstock.errors import FitError
from penstock.exchange.compression import AUTO, NATIVE, Scheme
from penstock.log import Voice
from penstock.network import Network
from penstock.plan import Plan, Route
from penstock.planning.agree import from_rank_0
from penstock.planning.candidates import candidates
from penstock.planning.explain import explain, summary, text_picture
from penstock.planning.inputs import PlanningInputs
from penstock.planning.observed import Drift, Sending, communication_seconds, measured_timeline
from penstock.planning.planning import WARMUP, Decision, Settings
from penstock.program.composition import LANES
from penstock.runtime.rehearse import Compiling
from penstock.timeline import Timeline
from penstock.torch.checkpoint import TorchMemory
from penstock.torch.clocks import device_name
from penstock.torch.collective_errors import GroupRanks
from penstock.torch.engines import engine_of
from penstock.torch.fsdp.groups import ShardGroup
from penstock.torch.fsdp.replicas import ReplicaAverage
from penstock.trace import Tensor, Trace

if TYPE_CHECKING:  # planners and the simulator are imported where a plan is made, as what measures is
    from penstock.planning.choose import Choice

KEPT_TIMES = 50  # iterations whose times `explain` reports
_NANO = 1e9
UNMEASURED = (
    "iterations on a GPU are not measured: the host's clock would time what it queues; so communication is not "
    "compared with the prediction"
)
UNPLANNED = (
    "neither a codec nor anything of planning was asked for, so every group of parameters travels by itself, as in "
    "torch's own HSDP"
)


class ReplicaPlanning:
    """The planning side of one sharded model."""

    def __init__(
        self,
        averages: ReplicaAverage,
        model: str,  # its name
        followers: Sequence[dist.ProcessGroup],  # within which the first rank's word counts, one after the other:
        # ranks that have the other parts of this replica, by shards and by tensor parallelism
        settings: Settings,
        memory: TorchMemory,
        compiling: Compiling,
        obstacle: str,  # why there will be no plan, or ""
        speaks: bool,  # this rank says what is to be said
    ) -> None:
        self.averages, self.settings, self.memory, self.obstacle = averages, settings, memory, obstacle
        self.decision: Decision | None = None
        self._model, self._followers, self._compiling = model, followers, compiling
        self.voice = Voice(speaks)
        self._clock = _Marks(averages.device)
        self._seen: list[tuple[list[str], list[float], float]] = []  # order, seconds between marks, forward
        self._profiled = 0  # synchronised backward passes before the plan, on all ranks alike
        self._drift, self._sending = Drift(settings.replan_drift), Sending()
        self._unwatched = False  # an iteration that was not yet compared with the plan
        self._started = deque[float](maxlen=KEPT_TIMES + 1)
        self._times: tuple[float, float] = (0.0, 0.0)  # on the host: end of forward, end of backward
        self._finished = True
        self._last: dict[str, float] | None = None  # what the last iteration took, as torch's DDP logs it
        averages.on_ready, averages.on_end, averages.on_averaged = self._on_ready, self._on_end, self._on_averaged
        if obstacle:
            self._get_ready(self._route_without_a_plan())
        else:
            self._check_inputs()

    # An iteration

    def before_forward(self) -> None:
        """Do what is to be done between two iterations."""
        if (failure := self.averages.exchange.failure) is not None:
            raise failure
        self.averages.forget_pass()
        if self._is_profiling:
            self._go_on_planning()
        elif self.decision is not None and self.settings.replan_drift and self._unwatched:
            self._unwatched = False
            self._watch_drift()
        if not self._finished and self._started:
            self._started.pop()  # no synchronised backward pass followed that forward pass
        self._started.append(perf_counter())
        self._finished = False
        self.averages.holds = self._holds
        self._clock.start()

    def after_forward(self) -> None:
        """Note when the forward pass has ended."""
        self._times = (perf_counter(), 0.0)
        self._clock.mark("")

    def _on_ready(self, group: ShardGroup) -> None:
        if self._is_profiling:
            self._clock.mark(group.name, group.scatter_stream)  # the current one is behind the groups sent before

    def _on_end(self) -> None:
        self._times = (self._times[0], perf_counter())

    def _on_averaged(self) -> None:
        self._finished = self._unwatched = True
        forward, end = self._times
        start, now = self._started[-1] if self._started else forward, perf_counter()
        self._last = {
            "forward_compute_time": (forward - start) * _NANO,
            "backward_compute_time": (end - forward) * _NANO,
            "backward_compute_comm_overlap_time": (end - forward) * _NANO,
            "backward_comm_time": (now - forward) * _NANO,
        }
        if self._is_profiling:
            self._note_profiled()

    # Planning

    @property
    def _is_profiling(self) -> bool:
        return self.decision is None and not self.obstacle

    @property
    def _holds(self) -> bool:
        """Whether messages of the pass to come wait for its end, as it is profiled."""
        left = self.settings.profile_iterations - self._profiled
        shows_slowdown = self.averages.device.type == "cpu" and left == 1 < self.settings.profile_iterations - WARMUP
        return self._is_profiling and not shows_slowdown

    def _note_profiled(self) -> None:
        """Take what an iteration without a plan has shown."""
        self._profiled += 1
        order, seconds = self._clock.read()
        if self._profiled <= WARMUP or len(order) <= 1:
            return
        if self.averages.holds:
            self._seen.append((order[1:], seconds[1:], seconds[0]))
        elif self._last is not None:
            sizes = {each.name: each.padded_nbytes for each in self.averages.groups}
            text = ", ".join(str(sizes[name]) for name in order[1:])
            self._sending.note(self._last | {"bucket_sizes": text}, self.measured_timeline())

    def _go_on_planning(self) -> None:
        if (given := self.settings.plan) is not None:
            with self.voice.holding_up("getting ready for the plan that was given") as outcome:
                self._adopt(Decision(given))
                outcome += summary(Decision(given))
        elif self.settings.trace is not None or self._profiled >= self.settings.profile_iterations:
            self._plan_together(self.settings.network)
        elif self._profiled == WARMUP:
            self._compiling.pause()

    def _plan_together(self, network: Network | None) -> None:
        """Measure between all replicas, plan on the first rank, and follow it everywhere."""
        with self.voice.holding_up("planning") as outcome:
            decision, complaint = None, ""
            try:
                decision = self._planned(network)
            except FitError as error:  # the same on all replicas of this shard
                complaint = str(error)
            decision, complaint = self._from_first((decision, complaint), "sharing the plan")
            if decision is None:
                self._give_up(complaint)
            else:
                self._adopt(decision)
                outcome += summary(decision)

    def _from_first(self, word: Any, what: str) -> Any:
        """Return on all ranks what the first rank says: parameters that tensor parallelism copies must stay copies."""
        for group in self._followers:
            word = GroupRanks(group).from_first(word, what)
        return word

    def _planned(self, network: Network | None) -> Decision:
        """Return what the first replica decides, from what all replicas of this shard measure."""
        from penstock.planning.choose import choose
        from penstock.planning.survey import Question, Survey
        from penstock.torch.device_measure import GroupGauge

        group, device = self.averages.replicas, self.averages.device
        most = sum(each.padded_nbytes for each in self.averages.groups) // 3
        survey = Survey(GroupGauge(group, device, None, most), self.settings.measurements, self._get_ready, self.voice)
        question = Question(self._routes(), network, self.settings.measure_seconds, self._choice)
        found, routes = survey.find(question)
        return from_rank_0(lambda: choose(self._choice(found), found, routes), GroupRanks(group))

    def _choice(self, network: Network) -> "Choice":
        """Return what the plan is to be chosen from."""
        from penstock.planning.choose import Choice

        trace, known = self._trace(), self.decision
        slowdown = known.slowdown if known else self._sending.slowdown(trace, network.all_reduce.get(NATIVE))
        auto, trusted = self.memory.compression.codec == AUTO, self.settings.network is not None and known is None
        lanes = LANES if self.averages.device.type == "cpu" else 1
        return Choice(trace, self.settings.planner, self._routes(), auto, trusted, slowdown, lanes, self.settings.bulk)

    def _trace(self) -> Trace:
        """Return the trace to plan for: given, of the plan in force, or what was profiled."""
        if self.settings.trace is not None:
            return self.settings.trace
        if self.decision is not None and self.decision.trace is not None:
            return self.decision.trace
        order = self._seen[-1][0]
        alike = [each for each in self._seen if each[0] == order]
        seconds = [median(each[1][index] for each in alike) for index in range(len(order))]
        groups = {each.name: each for each in self.averages.groups}
        tensors = tuple(
            Tensor(name, groups[name].padded_numel, taken) for name, taken in zip(order, seconds, strict=True)
        )
        dtype = str(self.averages.groups[0].dtype).removeprefix("torch.")
        forward = median(each[2] for each in alike)
        return Trace(self._model, device_name(self.averages.device), 1, dtype, forward, tensors)

    def _routes(self) -> tuple[Route, ...]:
        asked, workers = self.settings, dist.get_world_size(self.averages.replicas)
        return candidates(asked.strategy, self.memory.compression, asked.planner, self._engine, world_size=workers)

    def _route_without_a_plan(self) -> Route:
        averages = self.averages
        return route_without_a_plan(self.memory.compression, self.settings.strategy, averages.replicas, averages.device)

    @property
    def _engine(self) -> str:
        return engine_of(self.averages.replicas, self.averages.device)

    def _check_inputs(self) -> None:
        """Refuse a plan, trace or network of another model or another number of replicas."""
        settings, sizes = self.settings, {each.name: each.padded_nbytes for each in self.averages.groups}
        inputs = PlanningInputs(settings.plan, settings.trace, settings.network)
        inputs.agree(sizes, False, self.memory.compression, GroupRanks(self.averages.replicas))

    def _adopt(self, decision: Decision) -> None:
        for route in dict.fromkeys(bucket.route for bucket in decision.plan.buckets):
            self._get_ready(route)
        self._compiling.stop()
        self.decision = decision
        self.averages.follow(decision.plan, decision.network)
        self._drift.predicted_seconds = communication_seconds(decision.plan.timeline)
        self._started.clear()

    def _give_up(self, complaint: str) -> None:
        """Go on with groups by themselves, compressed as the user asked; or with the plan in force."""
        self.voice.warn(f"no plan: the network could not be measured ({complaint})")
        if self.decision is None:
            self.obstacle = f"the network could not be measured ({complaint})"
            route = self._route_without_a_plan()
            self._get_ready(route)
            self.averages.send_by(route)

    def _get_ready(self, route: Route) -> None:
        """Return once the kernels of a route are on disk; those on a GPU are not kept there."""
        if route.codec is not None and self.averages.device.type == "cpu" and not self._compiling.is_ready(route):
            with self.voice.step(f"compiling the kernels of {route.codec}"):
                self._compiling.ready(route)

    # What came of it

    def _watch_drift(self) -> None:
        """Compare the last iteration with the plan; now and then let the first rank say whether to plan again."""
        timeline = self.measured_timeline()
        self._drift.note(None if timeline is None else communication_seconds(timeline))
        if self._drift.is_due:
            drifted = GroupRanks(self.averages.replicas).from_first(self._drift.drifted, "asking whether to plan again")
            if self._from_first(drifted, "asking whether to plan again"):
                self._plan_together(None)
                assert self.decision is not None
                plan = self.decision.plan
                self._drift.replanned(plan.hash, communication_seconds(plan.timeline))

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return self.decision.plan if self.decision else None

    def measured_timeline(self) -> Timeline | None:
        """Return the last iteration as it was, on this rank; None on a GPU, whose kernels the host only queues."""
        if self._last is None or not self._started or self.averages.device.type != "cpu":
            return None
        exchange = self.averages.exchange
        rank = dist.get_rank(self.averages.replicas)
        return measured_timeline(self._last, exchange.sent, self._started[-1], rank, exchange.communicator.recorder)

    def explain(self, picture: bool) -> str:
        """Say what was decided and why."""
        measured = [after - before for before, after in pairwise(self._started)]
        last, used = self.measured_timeline() if self.decision else None, self.averages.exchange.routes_used()
        wanted = self.settings.profile_iterations
        unmeasured = "" if self.averages.device.type == "cpu" else UNMEASURED
        words = explain(
            self.decision, self.obstacle, self._profiled, wanted, measured, self._drift, last, used,
            unmeasured=unmeasured,
        )  # fmt: skip
        return "\n".join([words, *text_picture(self._timelines())]) if picture else words

    def _timelines(self) -> dict[str, Timeline]:
        found = {"predicted": self.plan.timeline if self.plan else None, "measured": self.measured_timeline()}
        return {name: timeline for name, timeline in found.items() if timeline is not None}


def route_without_a_plan(compression: Scheme, strategy: str, group: dist.ProcessGroup, device: torch.device) -> Route:
    """Return how groups travel by themselves where no plan can come: as the user asked."""
    if compression.codec in (None, AUTO):
        return Route(NATIVE)
    preferred = compression.strategies_by(engine_of(group, device), dist.get_world_size(group))[0]
    return Route(preferred if strategy == AUTO else strategy, compression.codec)


class _Marks:
    """Marks of one iteration: events on a GPU's streams, or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def start(self) -> None:
        """Begin an iteration."""
        self._marks = []
        self.mark("start")

    def mark(self, name: str, stream: Any = None) -> None:
        """Mark that something is there, for the first time: on a GPU, on a stream; None: the current one."""
        if any(name == marked for marked, _ in self._marks):
            return
        if not self._on_gpu:
            self._marks.append((name, perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream or torch.cuda.current_stream())
        self._marks.append((name, event))

    def read(self) -> tuple[list[str], list[float]]:
        """Return the names of all marks but the first, and the seconds from each mark to the next; waits on a GPU."""
        if self._on_gpu:
            torch.cuda.synchronize()
        names = [name for name, _ in self._marks[1:]]
        pairs = pairwise(mark for _, mark in self._marks)
        if self._on_gpu:
            return names, [max(0.0, float(before.elapsed_time(after)) * 1e-3) for before, after in pairs]
        return names, [after - before for before, after in pairs]
