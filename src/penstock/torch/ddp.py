"""DistributedDataParallel that profiles, plans, and then trains with the best buckets.

    from penstock.torch import DistributedDataParallel as DDP   # was: from torch.nn.parallel import ...
    model = DDP(model)

It *is* torch's DistributedDataParallel, with everything that does. The first iterations run with torch's own buckets
while the backward pass is profiled; then the network is measured, rank 0 plans, all ranks agree, and the buckets change
between two iterations.
"""

from collections import deque
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import FitError, PlanError, StrategyError
from penstock.network import Network, load_network
from penstock.plan import Plan, load_plan
from penstock.runtime.measure import measure_network
from penstock.runtime.transport.c10d import C10dTransport
from penstock.timeline import Timeline
from penstock.torch.buckets import TorchDDP, bucket_limits, can_hold_plans, take_buckets
from penstock.torch.explain import explain
from penstock.torch.hook import TIMEOUT_SECONDS, BucketSender
from penstock.torch.planning import (
    AUTO,
    NATIVE,
    Decision,
    agree,
    candidates,
    check_options,
    check_same,
    decide,
    in_registration_order,
)
from penstock.torch.profile import Profiler
from penstock.trace import Trace, load_trace

_TORCH_ARGUMENTS = (
    "device_ids", "output_device", "dim", "broadcast_buffers", "init_sync", "process_group", "bucket_cap_mb",
    "find_unused_parameters", "check_reduction", "gradient_as_bucket_view", "static_graph",
)  # fmt: skip  # in the order torch takes them by position
_WARMUP = 1  # profiled iterations that do not count: memory and connections are new
_KEPT_TIMES = 50  # iterations whose times `explain` reports


class DistributedDataParallel(TorchDDP):
    """torch's DistributedDataParallel with planned buckets; every argument of torch's is passed on.

    planner: naive, wfbp, single, threshold, greedy or exact. strategy: `native` (the engine's own all-reduce), the name
    of a penstock strategy, or `auto`, which lets the planner choose per bucket. network, trace, plan: values or files
    that replace measuring, profiling and planning. profile_iterations: how many synchronised iterations to profile.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *arguments: Any,
        planner: str = "exact",
        strategy: str = AUTO,
        codec: str | None = None,
        network: Network | str | None = None,
        trace: Trace | str | None = None,
        plan: Plan | str | None = None,
        profile_iterations: int = 5,
        **options: Any,
    ) -> None:
        check_options(planner, strategy)
        if codec is not None:
            raise StrategyError(f"codec {codec!r}: the wrapper does not compress yet; leave codec=None")
        if profile_iterations <= _WARMUP:
            raise PlanError(f"profile_iterations is {profile_iterations}; wanted at least {_WARMUP + 1}")
        options |= dict(zip(_TORCH_ARGUMENTS, arguments, strict=False))
        super().__init__(module, **options)
        self._arguments = options
        self._planner, self._strategy, self._profile_iterations = planner, strategy, profile_iterations
        self._network = load_network(network) if isinstance(network, str) else network
        self._trace = load_trace(trace) if isinstance(trace, str) else trace
        self._given = load_plan(plan) if isinstance(plan, str) else plan
        self._decision: Decision | None = None
        self._profiler: Profiler | None = None
        self._sender: BucketSender | None = None
        self._user_hook: tuple[Any, Any] | None = None
        self._profiled = 0
        self._started = deque[float](maxlen=_KEPT_TIMES + 1)
        self._obstacle = can_hold_plans(self)  # why torch's buckets are kept, or ""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; between two iterations, go on with profiling and planning."""
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._begin_iteration()
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Register a hook of the user's: buckets are planned all the same, and every bucket goes through the hook."""
        super().register_comm_hook(state, hook)
        self._user_hook = (state, hook)

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None while profiling."""
        return self._decision.plan if self._decision else None

    def timeline(self) -> Timeline | None:
        """Return the predicted timeline of an iteration; None while profiling."""
        return self._decision.plan.timeline if self._decision else None

    def explain(self) -> str:
        """Say what was decided and why."""
        measured = [after - before for before, after in pairwise(self._started)]
        return explain(self._decision, self._obstacle, self._profiled, self._profile_iterations, measured)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: hooks and the communication thread."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return state | {"_profiler": None, "_sender": None, "_profiled": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a reducer, with the plan's buckets where there is a plan."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._decision is not None:
            self._hold(self._decision.plan)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin_iteration(self) -> None:
        if self._sender is not None and self._sender.failure is not None:
            raise self._sender.failure
        self._started.append(perf_counter())
        joining = self._join_config.enable  # ranks that ran out of data cannot take part in planning
        if self._decision is None and not self._obstacle and not joining:
            self._go_on_planning()

    def _go_on_planning(self) -> None:
        if self._given is not None:
            check_same(self._given, self.process_group)
            self._adopt(Decision(self._given))
        elif self._trace is not None or self._profiled >= self._profile_iterations:
            self._plan_together()
        else:
            self._profile()

    def _profile(self) -> None:
        """Count an iteration; rank 0 watches it."""
        self._profiled += 1
        if self._profiler is None and dist.get_rank(self.process_group) == 0:
            self._profiler = Profiler(warmup=_WARMUP, counts=lambda: bool(self.require_backward_grad_sync))
            self._profiler.attach(self.module)

    def _plan_together(self) -> None:
        """Measure on all ranks, plan on rank 0, tell everybody and change the buckets."""
        if self._profiler is not None:
            self._profiler.detach()
        try:
            network = self._network or self._measure()
        except FitError as error:  # the same on all ranks, since they agree on every time; training goes on
            self._obstacle = f"the network could not be measured ({error})"
            return
        first = dist.get_rank(self.process_group) == 0
        self._adopt(agree((lambda: self._decide(network)) if first else None, self.process_group))

    def _measure(self) -> Network:
        transport = C10dTransport(self.process_group)
        return measure_network(transport, strategies=candidates(self._strategy)).network

    def _decide(self, network: Network) -> Decision:
        trace = self._trace
        if trace is None:
            assert self._profiler is not None
            trace, self._profiler = self._profiler.trace(), None
        if self.find_unused_parameters and not self.static_graph:  # torch never rebuilds these buckets
            trace = in_registration_order(trace, {name: p.numel() for name, p in self._trained()})
        return decide(trace, network, self._planner, self._strategy)

    def _adopt(self, decision: Decision) -> None:
        self._decision = decision
        self._hold(decision.plan)
        self._started.clear()
        self._started.append(perf_counter())  # this iteration starts now: planning is not part of it

    def _hold(self, plan: Plan) -> None:
        hook = self._user_hook
        if hook is None and (not plan.overlap or any(bucket.strategy != NATIVE for bucket in plan.buckets)):
            self._sender = BucketSender(self.process_group, TIMEOUT_SECONDS)
            self._sender.follow(plan, dict(self._trained()))
            hook = (None, self._sender.hook)
        take_buckets(self, self._arguments, bucket_limits(plan), hook)

    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad]
