"""DistributedDataParallel that profiles, plans, and then trains with the best buckets.

    from penstock.torch import DistributedDataParallel as DDP   # was: from torch.nn.parallel import ...
    model = DDP(model)

It *is* torch's DistributedDataParallel, with everything that does. The first iterations run with torch's own buckets
while the backward pass is profiled; then the network is measured, rank 0 plans, all ranks agree, and the buckets change
between two iterations. `conductor.py` does that; here is what a training script sees.
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from penstock.codecs.codec import Codec
from penstock.errors import PlanError
from penstock.exchange.compression import AUTO, Warmup, make_compression
from penstock.exchange.momentum import Momentum
from penstock.exchange.parameter_state import Memory, Scaler
from penstock.exchange.traffic import Traffic
from penstock.network import Network, load_network
from penstock.plan import Plan, load_plan
from penstock.planning.decide import Decision
from penstock.planning.measurement_cache import measurement_folder
from penstock.run_record import RouteUse
from penstock.timeline import Timeline
from penstock.torch.buckets import Hook, TorchDDP, steps_in_backward
from penstock.torch.check_inputs import compare_ranks, torch_options
from penstock.torch.checkpoint import Loads, State
from penstock.torch.collective_errors import together
from penstock.torch.conductor import Conductor, compile_ahead
from penstock.torch.settings import Settings
from penstock.trace import Trace, load_trace

Path = str | os.PathLike[str]
Value = TypeVar("Value", Network, Trace, Plan)
_TORCH_SIGNATURE = inspect.signature(TorchDDP.__init__)


class DistributedDataParallel(TorchDDP):
    """torch's DistributedDataParallel with planned buckets; every argument of torch's is passed on.

    One has another default: `gradient_as_bucket_view=True`, since it saves a copy of all gradients and its time (not
    around another wrapper).
    planner: naive, wfbp, single, threshold, greedy, exact, selective or joint. strategy: `native` (the engine's own
    all-reduce), the name of a penstock strategy, or `auto`, which lets the planner choose per bucket. network, trace,
    plan: values or files, of this model and as many ranks, that replace measuring, profiling and planning; a plan
    decides on codecs too. measurements: a folder that keeps measured networks, by cluster; None is the platform's cache
    folder, False keeps nothing. measure_seconds: how long measuring may take, once; more finds more of what is faster.
    profile_iterations: how many synchronised iterations to profile. replan_drift: plan again when communication takes
    that part longer or less long than predicted (0.3: 30%) for a while; 0 is off.
    codec: compresses every bucket, with error feedback: onebit, terngrad(bitwidth=2), ..., or a sparse exchange, gtopk
    or topk, with its density; with planner selective or joint those where it pays, and in how many pieces; `auto`
    compresses where that is predicted to pay, by one of `candidates`, and `explain` says which and why. warmup:
    densities before that, `warmup_every` iterations each (`codecs.warmup`). dense_below: tensors of fewer elements
    travel dense. select: entries are the largest of each tensor, of each bucket, or of the model (with planner single).
    momentum, nesterov: corrected as in DGC, for an optimizer that has none; momentum_masking forgets the velocity of
    what was sent. clip: limits what each rank adds to the average to norm clip / sqrt(ranks): the model's, so that
    nothing is sent before the backward pass is over, or with clip_by="tensor" each tensor's. on_nonfinite: what a
    compressed gradient with NaN or infinity does, on all ranks: raise, or skip, for steps that a gradient scaler skips;
    with `grad_scaler`, skip, and residuals follow its scale.
    engine: what carries gradients: None, the process group; `mpi`, MPI beside it, where mpirun started the ranks.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *arguments: Any,
        planner: str = "exact",
        strategy: str = AUTO,
        codec: str | Codec | None = None,
        candidates: Sequence[str] | None = None,
        density: float | None = None,
        warmup: Warmup = None,
        warmup_every: int = 1,
        dense_below: int = 0,
        momentum: float = 0.0,
        nesterov: bool = False,
        momentum_masking: bool = True,
        clip: float | None = None,
        clip_by: str = "model",
        select: str = "tensor",
        on_nonfinite: str = "raise",
        grad_scaler: Scaler | None = None,
        network: Network | Path | None = None,
        trace: Trace | Path | None = None,
        plan: Plan | Path | None = None,
        measurements: Path | bool | None = None,
        measure_seconds: float = 10.0,
        profile_iterations: int = 5,
        replan_drift: float = 0.0,
        engine: str | None = None,
        **options: Any,
    ) -> None:
        settings = Settings(
            planner=planner,
            strategy=strategy,
            network=_loaded(network, load_network),
            trace=_loaded(trace, load_trace),
            plan=_loaded(plan, load_plan),
            measurements=measurement_folder(measurements),
            measure_seconds=measure_seconds,
            profile_iterations=profile_iterations,
            replan_drift=replan_drift,
            engine=engine,
        )
        settings.check()
        kept = Momentum(momentum, nesterov, momentum_masking, clip, clip_by)
        compression = make_compression(codec, density, warmup, warmup_every, dense_below, kept, select, candidates)
        compression.check_strategy(strategy)
        compression.check_planner(planner)
        memory = Memory(compression, on_nonfinite, grad_scaler)
        bound = _TORCH_SIGNATURE.bind(self, module, *arguments, **options)  # a TypeError is what torch's would be
        options = {name: value for name, value in bound.arguments.items() if name not in ("self", "module")}
        nested = any(isinstance(each, TorchDDP) for each in module.modules())  # a gradient is a view of one bucket only
        options.setdefault("gradient_as_bucket_view", not nested)
        group = _group_of(options)
        token = compare_ranks(settings.options | memory.options | torch_options(options), module, group)
        memory.loads = Loads(group, token)
        compiling = compile_ahead(module, settings, compression)  # while torch shares the parameters
        with together("making torch's wrapper", options.get("process_group")):
            super().__init__(module, **options)
        memory.know(dict(module.named_parameters()))
        self._conductor = Conductor(self, settings, options, memory, compiling)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; between two iterations, go on with profiling and planning."""
        if torch.is_grad_enabled():
            self._begin_forward()
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module alone, and note when, on all ranks alike: torch.compile sees a module without hooks."""
        self._before_module(inputs, kwargs)
        output = super()._run_ddp_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        self._after_module(output)
        return output

    def _sync_buffers(self) -> None:
        """Give all ranks rank 0's buffers, as torch does before a forward pass."""
        with together("sharing buffers", self.process_group, self._conductor.holder.hang_up):
            super()._sync_buffers()  # type: ignore[no-untyped-call]

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Register a hook of the user's, which every bucket goes through.

        Buckets are planned all the same, unless the hook has state and has seen torch's: it may belong to them.
        """
        if "_conductor" not in vars(self):  # torch's own constructor registers one, for mixed_precision
            super().register_comm_hook(state, hook)
        else:
            self._conductor.register(Hook(hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Register one of torch's built-in hooks, which stays when the buckets change."""
        self._conductor.register(Hook(None, builtin=comm_hook_type))

    def _setup_in_backward_optimizers(self) -> None:
        """Let optimizers step during the backward pass; torch registers a hook of its own for that."""
        super()._setup_in_backward_optimizers()  # type: ignore[no-untyped-call]
        holder = self._conductor.holder
        if holder.user_hook is not None and steps_in_backward(self):
            holder.user_hook = replace(holder.user_hook, is_torchs=True)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Have torch time one iteration in `sample_rate`, also when the buckets change."""
        super()._set_ddp_runtime_logging_sample_rate(sample_rate)  # type: ignore[no-untyped-call]
        self._conductor.holder.user_sample_rate = sample_rate

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return torch's logging data, with the iterations that were counted before the buckets changed."""
        data: dict[str, Any] = super()._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        before = self._conductor.holder.logged_before
        return data | ({"iteration": data["iteration"] + before} if before and "iteration" in data else {})

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Go on with other ranks, which plan anew; what is owed is kept."""
        super()._update_process_group(new_process_group)  # type: ignore[no-untyped-call]
        if self.process_group is new_process_group:
            self._conductor.change_group()

    def _remove_autograd_hooks(self) -> None:
        """Stop averaging gradients; no plan brings that back."""
        super()._remove_autograd_hooks()  # type: ignore[no-untyped-call]
        self._conductor.obstacle = "its autograd hooks were removed"

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Cover for ranks that ran out of data, as torch does; what a hook of ours sends is divided by all ranks."""
        if not kwargs.get("divide_by_initial_world_size", True) and self._conductor.holder.sender:
            raise PlanError(
                "join with divide_by_initial_world_size=False: our strategies divide by all ranks, as every "
                "communication hook does; leave it out, or use strategy='native' without codec, momentum, clip, engine"
            )
        hook: JoinHook = super().join_hook(**kwargs)  # type: ignore[no-untyped-call]
        return hook

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None while profiling."""
        return self._conductor.plan

    @property
    def decision(self) -> Decision | None:
        """The plan in force with the trace and the network it was made from; None while profiling."""
        return self._conductor.decision

    @property
    def held_seconds(self) -> float:
        """How long training has stood still on this rank, so far, while penstock measured, compiled and planned."""
        return self._conductor.held_seconds

    def timeline(self) -> Timeline | None:
        """Return the predicted timeline of an iteration; None while profiling."""
        return self.plan.timeline if self.plan else None

    def measured_timeline(self) -> Timeline | None:
        """Return what the last iteration took on this rank: forward, backward, and communication, in buckets where
        they are known; None before the first one is over."""
        return self._conductor.measured_timeline()

    def record_instructions(self, on: bool = True) -> None:
        """Let `measured_timeline` show every encode, send, recv, merge and decode of the iterations to come.

        This looks at the clock between all of them: turn it on for an iteration that is to be drawn, then off.
        """
        self._conductor.record_instructions(on)

    def explain(self, picture: bool = False) -> str:
        """Say what was decided and why; with `picture`, also draw the predicted iteration above the measured one."""
        return self._conductor.explain(picture)

    def bytes_sent(self) -> Traffic:
        """Return the bytes this rank has put on the wire so far, and what a dense all-reduce of the same would have."""
        return self._conductor.holder.traffic()

    def routes_used(self) -> tuple[RouteUse, ...]:
        """Return by which routes the gradients of the last iteration really travelled, with what this rank sent.

        Of a hook of the user's nothing is known.
        """
        return self._conductor.holder.routes_used()

    @property
    def exchange_memory(self) -> Memory:
        """What the exchange keeps between iterations; `optim.CompressedAdamW` has its momentum sent through it."""
        return self._conductor.memory

    def exchange_state_dict(self) -> State:
        """Return what this rank still owes of each parameter's gradient; call it between iterations, on every rank.

        It belongs into a checkpoint beside the model and the optimizer. Every rank has its own.
        """
        memory = self._conductor.memory
        return memory.state_dict(dist.get_rank(self.process_group), dist.get_world_size(self.process_group))

    def load_exchange_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over from the states of *all* ranks of an earlier run, whatever its number of ranks.

        Call it on every rank at the same step, with the same states. What is wrong with them is raised on all ranks,
        and nothing is changed then.
        """
        rank, world_size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        self._conductor.memory.load_state_dicts(states, rank, world_size)
        self._conductor.holder.recover()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out our hook, which belongs to this process; what makes the reducer registers it anew."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return state | {"_comm_hooks": [] if self._conductor.holder.sender else list(self._comm_hooks)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a reducer, with the plan's buckets where there is a plan."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._conductor.resume()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin_forward(self) -> None:
        self._conductor.begin_forward(self.require_backward_grad_sync)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_module(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._conductor.before_module(inputs, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_module(self, output: Any) -> None:
        self._conductor.after_module(output)


def _group_of(options: Mapping[str, Any]) -> dist.ProcessGroup | None:
    """Return the process group that torch's wrapper will use; None: the default one."""
    mesh = options.get("device_mesh")
    return options.get("process_group") if mesh is None else mesh.get_group(mesh_dim=0)


def _loaded(given: Value | Path | None, load: Callable[[Path], Value]) -> Value | None:
    """Return a value that was given, or read it from the file that was."""
    return load(given) if isinstance(given, str | os.PathLike) else given
