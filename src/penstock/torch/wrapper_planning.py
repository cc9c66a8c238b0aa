"""Plans a wrapper's messages while it trains: profile, measure, plan, change the buckets, and watch what comes of it.

`buckets.py` changes the buckets; here is when and why.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any
from weakref import finalize, ref

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from penstock.errors import FitError, PlanError
from penstock.exchange.compression import AUTO, NATIVE, Scheme
from penstock.log import Voice
from penstock.network import Network
from penstock.plan import Plan, Route
from penstock.planning.agree import from_rank_0, nodes_of
from penstock.planning.candidates import candidates, routes_to_compile
from penstock.planning.explain import KEPT_TIMES, explain, of_queued, summary, text_picture
from penstock.planning.inputs import PlanningInputs
from penstock.planning.observed import Between, Drift, Race, Sending, communication_seconds, measured_timeline
from penstock.planning.planning import WARMUP, Decision, Settings
from penstock.program.composition import LANES
from penstock.runtime.hosts import Nodes, share_hosts
from penstock.runtime.pages import give_back_pages
from penstock.runtime.rehearse import Compiling
from penstock.timeline import Timeline
from penstock.torch.buckets import (
    Hook,
    Order,
    PlannedBuckets,
    TorchDDP,
    calls_no_hook,
    can_hold_plans,
    dense,
    gradient_nbytes,
    release_buckets,
    sending_order,
    thawed,
)
from penstock.torch.checkpoint import TorchMemory
from penstock.torch.clocks import synchronise
from penstock.torch.collective_errors import GroupRanks, raise_device_failure, together
from penstock.torch.engines import engine_of
from penstock.torch.profile import Profiler, gradient_sizes
from penstock.torch.watch import BackwardPasses, OptimizerWatch
from penstock.trace import Trace, in_order, only

if TYPE_CHECKING:  # planners and the simulator are imported where a plan is made, as what measures is
    from penstock.planning.choose import Choice
    from penstock.planning.measure import Gauge
    from penstock.torch.servers import ParameterServers

_SYNCHRONISES = "require_backward_grad_sync"  # of a wrapper: whether it is outside of no_sync
LEARNT_FROM = 10  # iterations of a plan on a GPU
LEAST_PROFILED, LONG_PROFILE_SECONDS = WARMUP + 2, 2.0  # on a GPU, whose iterations are alike: no more after so long


class WrapperPlanning:
    """The planning side of one wrapper."""

    def __init__(
        self,
        wrapper: TorchDDP,
        settings: Settings,
        arguments: dict[str, Any],
        memory: TorchMemory,
        compiling: Compiling,
        servers: "ParameterServers | None" = None,
    ) -> None:
        """`arguments` are those that torch's wrapper was made with, the module excepted."""
        self.settings, self.memory = settings, memory
        watched = settings.replan_drift > 0
        self.buckets = PlannedBuckets(wrapper, arguments, memory, settings.engine, watched, servers)
        self._wrapper = wrapper
        self._decision: Decision | None = None
        self._nodes: Nodes = ()  # the ranks of each host, once a plan may compress between them
        self._profiler: Profiler | None = None
        self._seen: Trace | None = None  # what was profiled, on rank 0
        self._compiling: Compiling | None = compiling  # the kernels of codecs that a plan may use, on this host
        self._voice = Voice(self._is_first)
        self._drift = Drift(settings.replan_drift)
        self._race: Race | None = None  # of plans that are predicted to take about the same, while it lasts
        self._sending, self._between = Sending(), Between()  # of profiled iterations, on rank 0
        self._profiled = 0  # synchronised backward passes before the plan, on all ranks alike
        self._may_profile_less = wrapper.device.type != "cpu"
        self._asked_after = 0  # so many, rank 0 was asked whether they are enough
        self._finished = False  # the iteration that was begun last had its backward pass
        self._unwatched = False  # and was not yet compared with the plan
        self._started = deque[float](maxlen=KEPT_TIMES + 1)
        self._has_joined = False  # the last `join` is over; torch goes on as if it were not
        self.obstacle = can_hold_plans(wrapper, self.buckets.parameters)  # why torch's buckets are kept, or ""
        self._refuse_what_torch_would_not_call()
        if self.obstacle:
            self._voice.warn(f"no plan: {self.obstacle}")
            self._get_ready_without_a_plan()
        else:
            self._check_inputs()
        self._hold()
        self._passes = self._watch_passes()
        self._optimizer = self._watch_optimizer()

    @property
    def decision(self) -> Decision | None:
        """The plan in force with what it was made from; None while profiling."""
        return self._decision

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return self._decision.plan if self._decision else None

    @property
    def is_racing(self) -> bool:
        """Whether plans take turns still."""
        return self._race is not None

    @property
    def held_seconds(self) -> float:
        """How long planning has held training up, on this rank."""
        return self._voice.held_seconds

    def begin_forward(self, synchronises: bool) -> None:
        """Do what is to be done between two iterations; a forward pass that no backward pass followed was none.

        Buckets change at the first forward pass after a synchronised backward pass, inside of `no_sync` or not: a
        reducer knows which parameters the passes inside used, and must not be replaced after them.
        """
        if (sender := self.buckets.sender) is not None and sender.exchange.failure is not None:
            raise sender.exchange.failure
        raise_device_failure("averaging a bucket", self._wrapper.process_group, self.buckets.hang_up)
        if self._decision is None and not self.obstacle and not self._joining:
            self._go_on_planning()
        elif self._decision is not None and self._unwatched and not self._joining:
            self._unwatched = False
            if self._race is not None:
                self._go_on_racing(self._race)
            elif self.settings.replan_drift:
                self._watch_drift()
        if synchronises:
            if not self._finished and self._started:
                self._started.pop()
            self._started.append(perf_counter())
            self._finished, self._passes.expected = False, True

    def join(self, hook: JoinHook) -> JoinHook:
        """Return torch's hook of a `join` that is about to begin, for ranks that ran out of data; it also ends that."""
        self._has_joined = False
        return _Joined(hook, self._end_join)

    def _end_join(self) -> None:
        """Go on planning: all ranks are here. Those that had no data saw no iteration, so none is looked back at."""
        self._has_joined, self._unwatched = True, False

    def before_module(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note when the wrapped module's forward pass begins, while profiling."""
        if self._profiler is not None:
            self._profiler.before_forward(inputs, kwargs)

    def after_module(self, output: Any) -> None:
        """Note when it has ended."""
        if self._profiler is not None:
            self._profiler.after_forward(output)

    def _on_backward(self) -> None:
        """Count an iteration; ranks do so alike, but in `join` some have run out of data."""
        if not self._joining:
            self.memory.goes_on()
        self._finished = self._unwatched = True
        if self._decision is None and not self._joining:
            self._profiled += 1
        self.buckets.count_iteration()

    def measured_timeline(self) -> Timeline | None:
        """Return the last iteration as it was, on this rank; on a GPU computation is that of the last torch timed."""
        return self._timeline_of(self._logged())

    def _logged(self) -> dict[str, Any]:
        """Return what torch logged about the last iteration."""
        if self._wrapper.logger is None:
            return {}
        self._wrapper.logger.set_runtime_stats_and_log()
        data: dict[str, Any] = self._wrapper._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        return data

    def _timeline_of(self, data: dict[str, Any]) -> Timeline | None:
        if not data or not self._started:
            return None
        sender = self.buckets.sender
        sent, notes = ((), None) if sender is None else (sender.exchange.sent, sender.exchange.communicator.recorder)
        return measured_timeline(data, sent, self._started[-1], dist.get_rank(self._group), notes)

    def record_instructions(self, on: bool) -> None:
        """Note every instruction of the iterations to come; none where the engine averages, or a GPU has a queue."""
        if (sender := self.buckets.sender) is not None:
            sender.exchange.record(on)

    def explain(self, picture: bool) -> str:
        """Say what was decided and why."""
        measured = [after - before for before, after in pairwise(self._started)]
        wanted = self.settings.profile_iterations
        last = self.measured_timeline() if self._decision else None
        used = self.buckets.routes_used()
        learnt = self._learnt()
        sent = () if self.buckets.sender is None else self.buckets.sender.exchange.sent
        words = explain(
            self._decision, self.obstacle, self._profiled, wanted, measured, self._drift, last, used,
            learnt=learnt, unmeasured=of_queued(sent),
        )  # fmt: skip
        words = words if self._race is None else f"{words}\n{self._race.said()}"
        if not picture:
            return words
        predicted = self.plan.timeline if self.plan else None
        return "\n".join([words, *text_picture({"predicted": predicted, "measured": self.measured_timeline()})])

    def _learnt(self) -> Decision | None:
        """Return the decision in force with what its iterations on a GPU have shown; as it is where they are few."""
        periods = [after - before for before, after in pairwise(self._started)]
        if self._decision is None or self._device.type == "cpu" or len(periods) < LEARNT_FROM or self.is_racing:
            return self._decision
        from penstock.planning.decide import learnt

        return learnt(self._decision, median(periods))

    def change_group(self) -> None:
        """Plan anew: the wrapper has another process group; a network or plan of other ranks no longer counts."""
        if self.buckets.servers is not None:
            raise PlanError("another process group with servers, which are those of the first; wrap the module anew")
        self._decision, self._nodes, self._seen, self._race = None, (), None, None
        self._profiled = self._asked_after = 0
        self._voice.speaks = self._is_first
        self.settings = replace(self.settings, network=None, plan=None)
        self.memory.change_group(self._group)
        self.buckets.forget()
        self._hold()
        if self._wrapper._lazy_init_ran:
            self.buckets.name_lost_ranks()

    def register(self, hook: Hook) -> None:
        """Register a communication hook of the user's; refuse it where the hook is needed for what was asked of us."""
        if needed := self._needs_the_hook():
            raise PlanError(f"{needed} needs the hook for itself; register none, or leave {needed.split()[0]} out")
        self.buckets.register(hook)

    def _refuse_what_torch_would_not_call(self) -> None:
        """Refuse options of torch's that leave no place for our hook, where it is needed."""
        for hook, state in vars(self._wrapper).get("_comm_hooks", ()):  # that torch's constructor registered
            self.buckets.user_hook = Hook(hook, state, is_torchs=True)
        taken = "mixed_precision, which registers a hook of its own; use torch.autocast"
        reason = calls_no_hook(self._wrapper) or (taken if self.buckets.user_hook else "")
        if reason and (needed := self._needs_the_hook()):
            raise PlanError(f"{needed} with {reason}; leave one of the two out")

    def _needs_the_hook(self) -> str:
        """Return which option of ours is carried out in a communication hook, or an empty string."""
        compression, settings = self.memory.compression, self.settings
        if compression.codec is not None:
            return f"codec {compression.codec!r}"
        if settings.engine is not None:
            return f"engine {settings.engine!r}"
        if compression.momentum.is_used:
            return "momentum= or clip="
        if settings.strategy not in (AUTO, NATIVE):
            return f"strategy {settings.strategy!r}"
        routes = {str(bucket.route) for bucket in settings.plan.buckets} if settings.plan else set()
        return f"plan= with buckets by {', '.join(sorted(routes))}" if routes - {NATIVE} else ""

    def resume(self) -> None:
        """Hold the plan again, in a wrapper that was copied or unpickled."""
        self.buckets.resume()
        self._hold()
        if self._wrapper._lazy_init_ran:
            self.buckets.name_lost_ranks()
        self._passes = self._watch_passes()
        self._optimizer = self._watch_optimizer()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: hooks."""
        left_out = dict.fromkeys(("_profiler", "_passes", "_optimizer", "_compiling", "_race"))
        return vars(self) | left_out | {"_profiled": 0, "_asked_after": 0, "_finished": False, "_unwatched": False}

    # Planning

    def _check_inputs(self) -> None:
        settings, compression = self.settings, self.memory.compression
        inputs = PlanningInputs(settings.plan, settings.trace, settings.network)
        found = self.buckets.parameters
        nbytes = {each.name: each.nbytes for each in found}
        may_lack = self._some_may_lack or any(each.is_sparse for each in found)
        inputs.agree(nbytes, may_lack, compression, self._ranks)

    def _go_on_planning(self) -> None:
        hook = self.buckets.user_hook
        if self._profiled and hook is not None and hook.may_keep_state_by_bucket:
            self.obstacle = (
                "your communication hook has state, which may belong to the buckets that it has seen; with plan= or "
                "trace= it gets planned ones from the start"
            )
            self._voice.warn(f"no plan: {self.obstacle}")
        elif self.settings.plan is not None:
            with self._voice.holding_up("getting ready for the plan that was given") as outcome:
                self._compile_for(self.settings.plan)
                self._adopt(Decision(self.settings.plan))
                outcome += summary(Decision(self.settings.plan))
        elif self.settings.trace is not None or self._has_profiled_enough():
            self._plan_together(self.settings.network)
        else:
            self._profile()

    def _has_profiled_enough(self) -> bool:
        """Say whether the iterations that were asked for are over, or fewer that took long on a GPU; all ranks alike.

        Over a slow network torch's own buckets take seconds, and the plan is what ends that.
        """
        if self._profiled >= self.settings.profile_iterations:
            return True
        if not self._may_profile_less or self._profiled < max(LEAST_PROFILED, self._asked_after + 1):
            return False
        self._asked_after = self._profiled
        took_long = perf_counter() - self._started[0] > LONG_PROFILE_SECONDS
        return bool(self._ranks.from_first(took_long, "asking rank 0 whether it has profiled enough"))

    def _profile(self) -> None:
        """Let rank 0 watch the iterations from now on; nothing is compiled beside those that count."""
        self._note_sending()
        if self._profiled >= WARMUP and self._compiling is not None:
            self._compiling.pause()
        if self._profiler is None and self._is_first:
            count = self.settings.profile_iterations
            self._voice.say(f"profiling {count} iterations, with torch's own buckets; then planning")
            wrapper = ref(self._wrapper)  # the module keeps the profiler, and must not keep a dropped wrapper alive
            self._profiler = Profiler(warmup=WARMUP, counts=lambda: getattr(wrapper(), _SYNCHRONISES, False))
            with thawed(self.buckets.parameters):
                self._profiler.attach(self._wrapper.module, hears_forward=False)
            finalize(self, _detach, ref(self._profiler))

    def _compile_for(self, plan: Plan) -> None:
        """Have the kernels of a plan on disk before its first bucket is sent."""
        for route in dict.fromkeys(bucket.route for bucket in plan.buckets):
            self._ready_for(route)
        if self._compiling is not None:
            self._compiling.stop()

    def _get_ready_without_a_plan(self) -> None:
        """Have the kernels on disk of a codec that compresses torch's own buckets."""
        if (route := self._route_without_a_plan()).codec is not None:
            with self._voice.holding_up("getting ready for torch's own buckets"):
                self._ready_for(route)

    def _ready_for(self, route: Route) -> None:
        """Return once the kernels of a route are on disk; those on a GPU are not kept there."""
        self._compiling = self._compiling or Compiling(())
        if self._device.type == "cpu":
            self._compiling.get_ready(route, self._voice)

    def _note_sending(self) -> None:
        """Note what the last profiled iteration sent while it computed, when that had arrived, and what came then."""
        if self._profiler is None or not self._finished or self.buckets.user_hook is not None:
            return
        if self._device.type == "cpu":
            data = self._logged()
            self._sending.note(data, self._timeline_of(data))
        elif self.buckets.sender is None:
            timeline = self.measured_timeline()
            self._between.note(timeline, perf_counter())

    def _plan_together(self, network: Network | None) -> None:
        """Measure on all ranks, plan on rank 0, tell all ranks and change the buckets."""
        self._note_sending()
        if self._profiler is not None:
            self._profiler.detach()
        with self._voice.holding_up("planning") as outcome:
            self._find_nodes()
            release_buckets(self._wrapper)  # measuring needs memory for its messages
            try:
                network, routes = self._survey(network)
                decision = from_rank_0(partial(self._decide, network, routes), self._ranks)
                self._compile_for(decision.plan)
            except FitError as error:  # the same on all ranks, since they agree on every time; training goes on
                self.buckets.take_back()
                if self._decision is None:  # otherwise the plan stays in force
                    self.obstacle = f"the network could not be measured ({error})"
                self._hold()
                self._voice.warn(f"no plan: the network could not be measured ({error})")
            except BaseException:
                self.buckets.take_back()  # a caller who goes on finds a whole wrapper
                raise
            else:
                give_back_pages()  # what measuring and the released buckets left in malloc's heap
                self._profiler = None
                self._adopt(decision)
                if decision.rivals and self.settings.race and self.settings.network is None:
                    self._race = Race((decision.plan, *decision.rivals))
                outcome += summary(decision)

    def _survey(self, network: Network | None) -> tuple[Network, tuple[Route, ...]]:
        """Return what a plan is made from, as rank 0 leads; messages fit into what the buckets took.

        That is a message, its copy, and what an engine adds.
        """
        from penstock.planning.survey import Question, Survey
        from penstock.torch.device_measure import GroupGauge

        most_nbytes, servers = gradient_nbytes(self.buckets.parameters) // 3, self.buckets.servers
        gauge: Gauge = (
            GroupGauge(self._group, self._device, self.settings.engine, most_nbytes)
            if servers is None
            else servers.gauge(most_nbytes)
        )
        survey = Survey(gauge, self.settings.measurements, self._ready_for, self._voice)
        question = Question(self._routes(), network, self.settings.measure_seconds, self._choice)
        with together("measuring the network", self._group, self.buckets.hang_up):
            return survey.find(question)

    def _choice(self, network: Network) -> "Choice":
        """Return what the plan is to be chosen from, on rank 0."""
        from penstock.planning.choose import Choice

        trace, known, settings = self._trace(), self._learnt(), self.settings
        slowdown = known.slowdown if known else self._sending.slowdown(trace, network.all_reduce.get(NATIVE))
        auto, trusted = self.memory.compression.codec == AUTO, settings.network is not None and known is None
        lanes = LANES if self._device.type == "cpu" else 1  # on a GPU, what is queued is not timed in lanes
        return Choice(trace, settings.planner, self._routes(), auto, trusted, slowdown, lanes, settings.bulk)

    def _decide(self, network: Network, routes: tuple[Route, ...]) -> Decision:
        from penstock.planning.choose import choose

        return choose(self._choice(network), network, routes, self._nodes)

    def _find_nodes(self) -> None:
        """Ask which ranks share a host, where a plan may compress between hosts only."""
        if self.settings.strategy == AUTO and self.memory.compression.local_strategy() and not self._nodes:
            self._nodes = nodes_of(self._ranks)

    def _trace(self) -> Trace:
        """Return the trace to plan for: given, of the plan in force, or profiled, which is read once."""
        known = self.settings.trace or (self._decision.trace if self._decision else None) or self._seen
        if known is None:
            assert self._profiler is not None
            self._seen = known = _with_step(self._profiler.trace(), self._between.seconds)
        _, planned = gradient_sizes(dense(self.buckets.parameters))
        match sending_order(self._wrapper):
            case Order.READY:
                return only(known, planned)
            case Order.REGISTERED:
                return in_order(known, planned)
            case Order.LAST_REGISTERED_FIRST:
                return in_order(known, dict(reversed(planned.items())))

    @property
    def _engine(self) -> str:
        """What carries gradients, by name."""
        return self.settings.engine or engine_of(self._group, self._device)

    def _routes(self) -> tuple[Route, ...]:
        if self.buckets.user_hook is not None:
            return (Route(NATIVE),)  # the hook sends the buckets, and does not say how
        asked, workers = self.settings, dist.get_world_size(self._group)
        compression, shares_hosts = self.memory.compression, share_hosts(self._nodes)
        return candidates(asked.strategy, compression, asked.planner, self._engine, shares_hosts, workers)

    # What came of it

    def _watch_drift(self) -> None:
        """Compare the last iteration with the plan; now and then let rank 0 say whether to plan again."""
        timeline = self.measured_timeline() if self._is_first else None
        if self._drift.asks_for_a_plan(timeline, self._ranks):
            self._plan_together(None)
            assert self._decision is not None
            plan = self._decision.plan
            self._drift.replanned(plan.hash, communication_seconds(plan.timeline))

    def _go_on_racing(self, race: Race) -> None:
        """Note what the last iteration took; change plans when the next one's turn comes, and keep the fastest."""
        assert self._decision is not None
        before = race.current
        synchronise(self._device)  # its queue may be iterations behind
        if self._started:  # not after a pass inside of `no_sync`
            race.note(perf_counter() - self._started[-1])
        if not race.is_over:
            if race.current != before:
                self._adopt(replace(self._decision, plan=race.current))
            return
        told = (race.fastest, race.said()) if self._is_first else None
        self._race, (fastest, said) = None, self._ranks.from_first(told, "asking rank 0 which plan was the fastest")
        notes = (*self._decision.notes, said)
        self._adopt(replace(self._decision, plan=race.plans[fastest], rivals=(), notes=notes))

    # Holding

    def _adopt(self, decision: Decision) -> None:
        self._decision = decision
        self._hold()
        self._drift.predicted_seconds = communication_seconds(decision.plan.timeline)
        self._started.clear()

    def _hold(self) -> None:
        """Hold the plan; without one, torch's buckets: where none can come, a codec compresses them as they are."""
        if self._decision is not None:
            self.buckets.hold(self._decision.plan, self._decision.network)
        else:
            self.buckets.keep(self._route_without_a_plan() if self.obstacle else Route(NATIVE))

    def _route_without_a_plan(self) -> Route:
        world_size, compression = dist.get_world_size(self._group), self.memory.compression
        compression.refuse_parts(f"without a plan, since {self.obstacle}, and torch's buckets are parts of the model")
        return compression.route(self._engine, world_size, self.settings.strategy)

    def _watch_passes(self) -> BackwardPasses:
        """Watch one parameter, or all where some may have no gradient: a call for each takes time."""
        parameters = [each.parameter for each in self.buckets.parameters]
        return BackwardPasses(parameters if self._some_may_lack else parameters[:1], self._on_backward)

    def _watch_optimizer(self) -> OptimizerWatch:
        """Wait for the optimizer of these parameters: codecs that the user named may not be safe for it."""
        planned = {bucket.codec for bucket in self.settings.plan.buckets if bucket.codec} if self.settings.plan else ()
        codecs = (*self.memory.compression.named, *sorted(planned))
        return OptimizerWatch(self._wrapper.parameters(), self.memory, codecs, self._is_first)

    @property
    def _ranks(self) -> GroupRanks:
        return GroupRanks(self._group) if self.buckets.servers is None else self.buckets.servers.ranks()

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._wrapper.process_group

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._wrapper.device
        return device

    @property
    def _some_may_lack(self) -> bool:
        """Whether torch allows parameters without a gradient."""
        return bool(self._wrapper.find_unused_parameters or self._wrapper.static_graph)

    @property
    def _joining(self) -> bool:
        """Whether ranks may have run out of data, which cannot take part in planning."""
        return bool(self._wrapper._join_config.enable) and not self._has_joined

    @property
    def _is_first(self) -> bool:
        return dist.get_rank(self._group) == 0


class _Joined(JoinHook):
    """torch's hook of one `join`, which tells when that is over."""

    def __init__(self, hook: JoinHook, told: Callable[[], None]) -> None:
        self._hook, self._told, self._is_over = hook, told, False

    def main_hook(self) -> None:
        """Take part in an iteration of the ranks that have data."""
        if self._is_over:
            raise PlanError("a context of join() is entered a second time; call join() anew for every `with`")
        self._hook.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Share what came of it; on all ranks."""
        self._hook.post_hook(is_last_joiner)
        self._is_over = True
        self._told()


def compile_ahead(module: torch.nn.Module, settings: Settings, compression: Scheme, world_size: int) -> Compiling:
    """Have other processes of this host compile the kernels that training may need; on a GPU there are others."""
    on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
    return Compiling(routes_to_compile(settings, compression, world_size) if on_cpu else ())


def _with_step(trace: Trace, seconds: float) -> Trace:
    """Return a trace that computes for so many seconds more before its backward pass: the optimizer's step."""
    if not seconds:
        return trace
    said = f"forward with {1e3 * seconds:.3g} ms between iterations"
    return replace(trace, forward_seconds=trace.forward_seconds + seconds, source=f"{trace.source}; {said}")


def _detach(profiler: "ref[Profiler]") -> None:
    """Take the hooks of a profiler off the module, which outlives a dropped wrapper."""
    if (found := profiler()) is not None:
        found.detach()
