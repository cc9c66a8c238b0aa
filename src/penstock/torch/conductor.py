"""Leads a wrapper from torch's own buckets to planned ones: profile, measure, plan, hold, and see what came of it.

`holder.py` changes the buckets; here is when and why.
"""

from collections import deque
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import Any
from weakref import finalize, ref

import torch
import torch.distributed as dist

from penstock.errors import FitError, PlanError
from penstock.network import Network
from penstock.plan import Plan, Route
from penstock.runtime.hosts import Nodes, describe_nodes, share_hosts
from penstock.runtime.pages import give_back_pages
from penstock.timeline import Timeline
from penstock.torch.buckets import (
    Hook,
    Order,
    TorchDDP,
    calls_no_hook,
    can_hold_plans,
    dense,
    gradient_nbytes,
    release_buckets,
    sending_order,
)
from penstock.torch.compression import AUTO, MIXING_PLANNERS, NATIVE
from penstock.torch.drift import Drift
from penstock.torch.explain import explain
from penstock.torch.given import Given
from penstock.torch.holder import Holder
from penstock.torch.measure import engine_of, measure, with_lines
from penstock.torch.measured import communication_seconds, measured_timeline
from penstock.torch.memory import Memory
from penstock.torch.nodes import nodes_of
from penstock.torch.optimizers import OptimizerWatch
from penstock.torch.passes import BackwardPasses
from penstock.torch.planning import (
    Decision,
    agree,
    decide,
    decide_whether,
    from_rank_0,
    in_order,
    only,
)
from penstock.torch.profile import Profiler
from penstock.torch.routes import candidates, further
from penstock.torch.settings import WARMUP, Settings
from penstock.torch.sizes import gradient_sizes
from penstock.torch.slowdown import Sending
from penstock.torch.text_picture import text_picture
from penstock.torch.together import together
from penstock.trace import Trace

_SYNCHRONISES = "require_backward_grad_sync"  # of a wrapper: whether it is outside of no_sync
KEPT_TIMES = 50  # iterations whose times `explain` reports


class Conductor:
    """The planning side of one wrapper."""

    def __init__(self, wrapper: TorchDDP, settings: Settings, arguments: dict[str, Any], memory: Memory) -> None:
        """`arguments` are those that torch's wrapper was made with, the module excepted."""
        self.settings, self.memory = settings, memory
        self.holder = Holder(wrapper, arguments, memory, settings.engine, settings.replan_drift > 0)
        self._wrapper = wrapper
        self._decision: Decision | None = None
        self._nodes: Nodes = ()  # the ranks of each host, once a plan may compress between them
        self._profiler: Profiler | None = None
        self._drift = Drift(settings.replan_drift)
        self._sending = Sending()  # of profiled iterations, on rank 0
        self._profiled = 0  # synchronised backward passes before the plan, on all ranks alike
        self._finished = False  # the iteration that was begun last had its backward pass
        self._unwatched = False  # and was not yet compared with the plan
        self._started = deque[float](maxlen=KEPT_TIMES + 1)
        self.obstacle = can_hold_plans(wrapper, self.holder.parameters)  # why torch's buckets are kept, or ""
        self._refuse_what_torch_would_not_call()
        if not self.obstacle:
            self._check_given()
        self._hold()
        self._passes = self._watch_passes()
        self._optimizer = self._watch_optimizer()

    @property
    def decision(self) -> Decision | None:
        """What was decided, and from what."""
        return self._decision

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return self._decision.plan if self._decision else None

    def begin_forward(self, synchronises: bool) -> None:
        """Do what is to be done between two iterations; a forward pass that no backward pass followed was none.

        Buckets change at the first forward pass after a synchronised backward pass, inside of `no_sync` or not: a
        reducer knows which parameters the passes inside used, and must not be replaced after them.
        """
        if (sender := self.holder.sender) is not None and sender.failure is not None:
            raise sender.failure
        if self._decision is None and not self.obstacle and not self._joining:
            self._go_on_planning()
        elif self._decision is not None and self.settings.replan_drift and self._unwatched and not self._joining:
            self._unwatched = False
            self._watch_drift()
        if synchronises:
            if not self._finished and self._started:
                self._started.pop()
            self._started.append(perf_counter())
            self._finished, self._passes.expected = False, True

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
        self.holder.count_iteration()

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
        sender = self.holder.sender
        sent, notes = ((), None) if sender is None else (sender.sent, sender.recorder)
        return measured_timeline(data, sent, self._started[-1], dist.get_rank(self._group), notes)

    def record_instructions(self, on: bool) -> None:
        """Note every instruction of the iterations to come; nothing where the engine averages buckets by itself."""
        if (sender := self.holder.sender) is not None:
            sender.record(on)

    def explain(self, picture: bool) -> str:
        """Say what was decided and why."""
        measured = [after - before for before, after in pairwise(self._started)]
        wanted = self.settings.profile_iterations
        last = self.measured_timeline() if self._decision else None
        used = self.holder.routes_used()
        words = explain(self._decision, self.obstacle, self._profiled, wanted, measured, self._drift, last, used)
        return "\n".join([words, *text_picture(self._timelines())]) if picture else words

    def _timelines(self) -> dict[str, Timeline]:
        found = {"predicted": self.plan.timeline if self.plan else None, "measured": self.measured_timeline()}
        return {name: timeline for name, timeline in found.items() if timeline is not None}

    def change_group(self) -> None:
        """Plan anew: the wrapper has another process group; a network or plan of other ranks no longer counts."""
        self._decision, self._nodes, self._profiled = None, (), 0
        self.settings = replace(self.settings, network=None, plan=None)
        self.memory.change_group(self._group)
        self.holder.forget()
        self._hold()

    def register(self, hook: Hook) -> None:
        """Register a communication hook of the user's; refuse it where the hook is needed for what was asked of us."""
        if needed := self._needs_the_hook():
            raise PlanError(f"{needed} needs the hook for itself; register none, or leave {needed.split()[0]} out")
        self.holder.register(hook)

    def _refuse_what_torch_would_not_call(self) -> None:
        """Refuse options of torch's that leave no place for our hook, where it is needed."""
        for hook, state in vars(self._wrapper).get("_comm_hooks", ()):  # that torch's constructor registered
            self.holder.user_hook = Hook(hook, state, is_torchs=True)
        taken = "mixed_precision, which registers a hook of its own; use torch.autocast"
        reason = calls_no_hook(self._wrapper) or (taken if self.holder.user_hook else "")
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
        self.holder.resume()
        self._hold()
        self._passes = self._watch_passes()
        self._optimizer = self._watch_optimizer()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: hooks."""
        left_out = dict.fromkeys(("_profiler", "_passes", "_optimizer"))
        return vars(self) | left_out | {"_profiled": 0, "_finished": False, "_unwatched": False}

    # Planning

    def _check_given(self) -> None:
        settings, compression = self.settings, self.memory.compression
        given = Given(settings.plan, settings.trace, settings.network)
        found = self.holder.parameters
        nbytes = {each.name: each.nbytes for each in found}
        may_lack = self._some_may_lack or any(each.is_sparse for each in found)
        given.agree(nbytes, may_lack, compression, self._group)

    def _go_on_planning(self) -> None:
        hook = self.holder.user_hook
        if self._profiled and hook is not None and hook.may_keep_state_by_bucket:
            self.obstacle = (
                "your communication hook has state, which may belong to the buckets that it has seen; with plan= or "
                "trace= it gets planned ones from the start"
            )
        elif self.settings.plan is not None:
            self._adopt(Decision(self.settings.plan))
        elif self.settings.trace is not None or self._profiled >= self.settings.profile_iterations:
            self._plan_together(self.settings.network)
        else:
            self._profile()

    def _profile(self) -> None:
        """Let rank 0 watch the iterations from now on."""
        self._note_sending()
        if self._profiler is None and self._is_first:
            wrapper = ref(self._wrapper)  # the module keeps the profiler, and must not keep a dropped wrapper alive
            self._profiler = Profiler(warmup=WARMUP, counts=lambda: getattr(wrapper(), _SYNCHRONISES, False))
            self._profiler.attach(self._wrapper.module, hears_forward=False)
            finalize(self, _detach, ref(self._profiler))

    def _note_sending(self) -> None:
        """Note what the last profiled iteration sent while it computed, and when that had arrived."""
        if (
            self._profiler is not None
            and self._finished
            and self._device.type == "cpu"
            and self.holder.user_hook is None
        ):
            data = self._logged()
            self._sending.note(data, self._timeline_of(data))

    def _plan_together(self, network: Network | None) -> None:
        """Measure on all ranks, plan on rank 0, tell everybody and change the buckets."""
        self._note_sending()
        if self._profiler is not None:
            self._profiler.detach()
        self._choose_candidates()
        self._find_nodes()
        release_buckets(self._wrapper)  # measuring needs memory for its messages
        try:
            network = self._completed(network) if network else self._measure()
            network, routes = self._refined(network)
            decision = agree((lambda: self._decide(network, routes)) if self._is_first else None, self._group)
        except FitError as error:  # the same on all ranks, since they agree on every time; training goes on
            self.holder.take_back()
            if self._decision is None:  # otherwise the plan stays in force
                self.obstacle = f"the network could not be measured ({error})"
            self._hold()
        except BaseException:
            self.holder.take_back()  # a caller who goes on finds a whole wrapper
            raise
        else:
            give_back_pages()  # what measuring and the released buckets left in malloc's heap
            self._profiler = None
            self._adopt(decision)

    def _choose_candidates(self) -> None:
        """Have "auto" choose from what is safe for the optimizer that rank 0 has seen."""
        if self.memory.compression.by_optimizer:
            codecs = from_rank_0(self._optimizer.candidates if self._is_first else None, self._group)
            self.memory.compression = self.memory.compression.for_optimizer(codecs)

    def _completed(self, network: Network) -> Network:
        return with_lines(network, self._group, self._routes(), self._device, engine=self.settings.engine)

    def _refined(self, network: Network) -> tuple[Network, tuple[Route, ...]]:
        """Measure more of what looks best so far, which rank 0 says; return all routes to choose from."""
        routes, settings, compression = self._routes(), self.settings, self.memory.compression
        if compression.codec != AUTO and (compression.codec is None or settings.planner not in MIXING_PLANNERS):
            return network, routes

        def look() -> tuple[Route, ...]:
            shares_hosts = share_hosts(self._nodes)
            return further(
                self._trace(), network, settings.planner, routes, settings.strategy, compression, shares_hosts
            )

        more = from_rank_0(look if self._is_first else None, self._group)
        folder = None if settings.network else settings.measurements
        try:
            refined = with_lines(network, self._group, more, self._device, engine=settings.engine, folder=folder)
        except FitError:  # the same on all ranks; what was measured before will do
            return network, routes
        return refined, (*routes, *more)

    def _measure(self) -> Network:
        """Measure with messages that fit into what the buckets took: a message, its copy, and what an engine adds."""
        return measure(
            self._group,
            self._routes(),
            self._device,
            self.settings.measurements,
            engine=self.settings.engine,
            most_nbytes=gradient_nbytes(self.holder.parameters) // 3,
        )

    def _decide(self, network: Network, routes: tuple[Route, ...]) -> Decision:
        trace, known, planner = self._trace(), self._decision, self.settings.planner
        slowdown = known.slowdown if known else self._sending.slowdown(trace, network.all_reduce.get(NATIVE))
        if self.memory.compression.codec == AUTO:
            return self._noted(decide_whether(trace, network, planner, routes, slowdown))
        return self._noted(decide(trace, network, planner, routes, slowdown))

    def _noted(self, decision: Decision) -> Decision:
        """Say where ranks were found, if that made a difference to what was measured."""
        if not share_hosts(self._nodes):
            return decision
        found = f"{describe_nodes(self._nodes)}: summing inside hosts first was measured too, as hierarchical"
        return replace(decision, notes=(*decision.notes, found))

    def _find_nodes(self) -> None:
        """Ask which ranks share a host, where a plan may compress between hosts only."""
        if self.settings.strategy == AUTO and self.memory.compression.local_strategy and not self._nodes:
            self._nodes = nodes_of(self._group)

    def _trace(self) -> Trace:
        known = self.settings.trace or (self._decision.trace if self._decision else None)
        if known is None:
            assert self._profiler is not None
            known = self._profiler.trace()
        _, planned = gradient_sizes(dense(self.holder.parameters))
        match sending_order(self._wrapper):
            case Order.READY:
                return only(known, planned)
            case Order.REGISTERED:
                return in_order(known, planned)
            case Order.LAST_REGISTERED_FIRST:
                return in_order(known, dict(reversed(planned.items())))

    def _routes(self) -> tuple[Route, ...]:
        if self.holder.user_hook is not None:
            return (Route(NATIVE),)  # the hook sends the buckets, and does not say how
        engine = self.settings.engine or engine_of(self._group, self._device)
        settings, shares_hosts = self.settings, share_hosts(self._nodes)
        return candidates(settings.strategy, self.memory.compression, settings.planner, engine, shares_hosts)

    # What came of it

    def _watch_drift(self) -> None:
        """Compare the last iteration with the plan; now and then let rank 0 say whether to plan again."""
        timeline = self.measured_timeline() if self._is_first else None
        self._drift.note(None if timeline is None else communication_seconds(timeline))
        if self._drift.is_due and self._rank_0_says(self._drift.drifted):
            self._plan_together(None)
            assert self._decision is not None
            plan = self._decision.plan
            self._drift.replanned(plan.hash, communication_seconds(plan.timeline))

    def _rank_0_says(self, answer: bool) -> bool:
        box = [answer]
        with together("asking rank 0 whether to plan again", self._group):
            dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]

    # Holding

    def _adopt(self, decision: Decision) -> None:
        self._decision = decision
        self._hold()
        self._drift.predicted_seconds = communication_seconds(decision.plan.timeline)
        self._started.clear()

    def _hold(self) -> None:
        """Hold the plan; without one, torch's buckets: where none can come, a codec compresses them as they are."""
        if self._decision is not None:
            self.holder.hold(self._decision.plan)
        else:
            self.holder.keep(self._route_without_a_plan() if self.obstacle else Route(NATIVE))

    def _route_without_a_plan(self) -> Route:
        compression, strategy = self.memory.compression, self.settings.strategy
        if compression.codec in (None, AUTO):
            return Route(NATIVE)
        return Route(compression.strategies[0] if strategy == AUTO else strategy, compression.codec)

    def _watch_passes(self) -> BackwardPasses:
        """Watch one parameter, or all where some may have no gradient: a call for each takes time."""
        parameters = [each.parameter for each in self.holder.parameters]
        return BackwardPasses(parameters if self._some_may_lack else parameters[:1], self._on_backward)

    def _watch_optimizer(self) -> OptimizerWatch:
        """Wait for the optimizer of these parameters: codecs that the user named may not be safe for it."""
        planned = {bucket.codec for bucket in self.settings.plan.buckets if bucket.codec} if self.settings.plan else ()
        codecs = (*self.memory.compression.named, *sorted(planned))
        return OptimizerWatch(self._wrapper.parameters(), self.memory, codecs, self._is_first)

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
        return bool(self._wrapper._join_config.enable)

    @property
    def _is_first(self) -> bool:
        return dist.get_rank(self._group) == 0


def _detach(profiler: "ref[Profiler]") -> None:
    """Take the hooks of a profiler off the module, which outlives a dropped wrapper."""
    if (found := profiler()) is not None:
        found.detach()
