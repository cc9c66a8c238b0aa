"""DistributedDataParallel that profiles, plans, and then trains with the best buckets.

    from penstock.torch import DistributedDataParallel as DDP   # was: from torch.nn.parallel import ...
    model = DDP(model)

It *is* torch's DistributedDataParallel, with everything that does. The first iterations run with torch's own buckets
while the backward pass is profiled; then the network is measured, rank 0 plans, all ranks agree, and the buckets change
between two iterations. `wrapper_planning.py` does that; here is what a training script sees.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from penstock.codecs.codec import Codec
from penstock.codecs.registry import is_low_rank
from penstock.errors import PlanError, did_you_mean
from penstock.exchange.compression import AUTO, Compression, CompressionOptions, check_aggregators, from_options
from penstock.exchange.parameter_state import Memory, Scaler
from penstock.exchange.state import State
from penstock.exchange.traffic import Traffic
from penstock.plan import Plan
from penstock.planning.planning import Decision, Planning, PlanningOptions, Settings
from penstock.run_record import RouteUse
from penstock.timeline import Timeline
from penstock.torch.buckets import Hook, TorchDDP, steps_in_backward
from penstock.torch.check_inputs import compare_ranks, require_group, torch_options
from penstock.torch.checkpoint import Loads, TorchMemory
from penstock.torch.collective_errors import together
from penstock.torch.engines import check_engine, connect_devices
from penstock.torch.wrapper_planning import WrapperPlanning, compile_ahead

if TYPE_CHECKING:
    from penstock.torch.servers import ParameterServers

_TORCH_SIGNATURE = signature(TorchDDP.__init__)


class WrapperOptions(CompressionOptions, PlanningOptions, total=False):
    """Keywords of the wrapper, for type checkers: fields of `Compression` and `Planning`, and torch's own arguments."""

    strategy: str
    device_ids: Sequence[int | torch.device] | None
    output_device: int | torch.device | None
    dim: int
    broadcast_buffers: bool | None
    init_sync: bool
    process_group: dist.ProcessGroup | None
    bucket_cap_mb: float | None
    find_unused_parameters: bool
    check_reduction: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    delay_all_reduce_named_params: Sequence[tuple[str, torch.nn.Parameter]] | None
    param_to_hook_all_reduce: torch.nn.Parameter | None
    mixed_precision: Any
    device_mesh: Any
    skip_all_reduce_unused_params: bool
    bucket_cap_mb_list: list[int] | None
    batched_grad_copy: bool
    forward_sync_buffers: bool | None


class DistributedDataParallel(TorchDDP):
    """torch's DistributedDataParallel with planned buckets; every argument of torch's is passed on.

    One has another default: `gradient_as_bucket_view=True`, since it saves a copy of all gradients and its time (not
    around another wrapper).

    Args:
        module: The model to train, whole on every rank.
        *arguments: torch's arguments by position: `device_ids`, `output_device`, ...
        compression: How gradients are compressed: codec, density, warm-up, momentum, clipping.
        codec: Short for `compression=Compression(codec=...)`. A codec compresses every bucket, with error feedback:
            `blocks(bits=4)`, `onebit`, ..., or a sparse exchange, `gtopk` or `topk`. With planner `selective` or
            `joint` it compresses the buckets where that pays, in as many pieces as that takes. `auto` chooses the codec
            too, and compresses only where that is predicted to pay; `explain` says which and why.
        planning: How messages are planned: planner, strategy, and files that replace measuring, profiling and planning.
        on_nonfinite: What a compressed gradient with NaN or infinity does, on all ranks: raise `NonFiniteError`, or
            skip the step, as gradient scalers do.
        grad_scaler: The scaler of the training loop: steps that it skips are skipped, and residuals follow its scale.
        engine: What carries gradients: None is the process group; `mpi` is MPI beside it, where mpirun started the
            ranks.
        servers: Ranks that only aggregate; the wrapper is of the others.
        **keywords: Fields of `Compression` and `Planning` by themselves (`density=0.01`, `planner="single"`), and
            torch's arguments (`find_unused_parameters=True`).
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *arguments: Any,
        compression: Compression | None = None,
        codec: str | Codec | None = None,
        planning: Planning | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        grad_scaler: Scaler | None = None,
        engine: Literal["mpi"] | None = None,
        servers: "ParameterServers | None" = None,
        **keywords: Unpack[WrapperOptions],
    ) -> None:
        options: dict[str, Any] = {**keywords} | ({} if codec is None else {"codec": codec})
        _check_types(module, servers)
        asked = from_options(Compression, compression, "compression", options)
        settings = from_options(Planning, planning, "planning", options).settings(engine)
        check_engine(engine)
        scheme = asked.scheme()
        if servers is not None:
            settings = _with_servers(servers, settings, options, codec=scheme.codec, scaler=grad_scaler)
        check_aggregators(settings.strategy, 0 if servers is None else servers.count)
        scheme.check_strategy(settings.strategy)
        scheme.check_planner(settings.planner)
        memory = TorchMemory(scheme, on_nonfinite, grad_scaler)
        _refuse_unknown(options)
        bound = _TORCH_SIGNATURE.bind(self, module, *arguments, **options)  # a TypeError is what torch's would be
        options = {name: value for name, value in bound.arguments.items() if name not in ("self", "module")}
        nested = any(isinstance(each, TorchDDP) for each in module.modules())  # a gradient is a view of one bucket only
        options.setdefault("gradient_as_bucket_view", not nested)
        group = require_group(_group_of(options))
        if (first := next(module.parameters(), None)) is not None:
            connect_devices(group, first.device)
        token = compare_ranks(settings.options | memory.options | torch_options(options), module, group)
        memory.loads = Loads(group, token)
        compiling = compile_ahead(
            module, settings, scheme, dist.get_world_size(group)
        )  # while torch shares the parameters
        with together("making torch's wrapper", options.get("process_group")):
            super().__init__(module, **options)
        memory.know_parameters(dict(module.named_parameters()))
        self._planning = WrapperPlanning(self, settings, options, memory, compiling, servers)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; between two iterations, go on with profiling and planning."""
        if torch.is_grad_enabled():
            self._begin_forward()
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Do what torch does before the module runs: its buckets and buffers, which rank 0 tells the others."""
        with together("sharing buckets", self.process_group, self._planning.buckets.hang_up):
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _lazy_init(self) -> None:
        """Get ready for the first forward pass; from here on a hook of the user's, or of torch's own, is known."""
        super()._lazy_init()  # type: ignore[no-untyped-call]
        self._planning.buckets.name_lost_ranks()

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module alone, and note when, on all ranks alike: torch.compile sees a module without hooks."""
        self._before_module(inputs, kwargs)
        output = super()._run_ddp_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        self._after_module(output)
        return output

    def _sync_buffers(self) -> None:
        """Give all ranks rank 0's buffers, as torch does before a forward pass."""
        with together("sharing buffers", self.process_group, self._planning.buckets.hang_up):
            super()._sync_buffers()  # type: ignore[no-untyped-call]

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Register a hook of the user's, which every bucket goes through.

        Buckets are planned all the same, unless the hook has state and has seen torch's: it may belong to them.
        """
        if "_planning" not in vars(self):  # torch's own constructor registers one, for mixed_precision
            super().register_comm_hook(state, hook)
        else:
            self._planning.register(Hook(hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Register one of torch's built-in hooks, which stays when the buckets change."""
        self._planning.register(Hook(None, builtin=comm_hook_type))

    def _setup_in_backward_optimizers(self) -> None:
        """Let optimizers step during the backward pass; torch registers a hook of its own for that."""
        super()._setup_in_backward_optimizers()  # type: ignore[no-untyped-call]
        buckets = self._planning.buckets
        if buckets.user_hook is not None and steps_in_backward(self):
            buckets.user_hook = replace(buckets.user_hook, is_torchs=True)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Have torch time one iteration in `sample_rate`, also when the buckets change."""
        super()._set_ddp_runtime_logging_sample_rate(sample_rate)  # type: ignore[no-untyped-call]
        self._planning.buckets.user_sample_rate = sample_rate

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return torch's logging data, with the iterations that were counted before the buckets changed."""
        data: dict[str, Any] = super()._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        before = self._planning.buckets.logged_before
        return data | ({"iteration": data["iteration"] + before} if before and "iteration" in data else {})

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Go on with other ranks, which plan anew; what is owed is kept."""
        super()._update_process_group(new_process_group)  # type: ignore[no-untyped-call]
        if self.process_group is new_process_group:
            self._planning.change_group()

    def _remove_autograd_hooks(self) -> None:
        """Stop averaging gradients; no plan brings that back."""
        super()._remove_autograd_hooks()  # type: ignore[no-untyped-call]
        self._planning.obstacle = "its autograd hooks were removed"

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Cover for ranks that ran out of data, as torch does; what a hook of ours sends is divided by all ranks."""
        if not kwargs.get("divide_by_initial_world_size", True) and self._planning.buckets.sender:
            raise PlanError(
                "join with divide_by_initial_world_size=False: our strategies divide by all ranks, as every "
                "communication hook does; leave it out, or use strategy='native' without codec, momentum, clip, engine"
            )
        if not kwargs.get("divide_by_initial_world_size", True):
            self._planning.buckets.leave_to_torch()
        return self._planning.join(super().join_hook(**kwargs))  # type: ignore[no-untyped-call]

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None while profiling."""
        return self._planning.plan

    @property
    def decision(self) -> Decision | None:
        """The plan in force with the trace and the network it was made from; None while profiling."""
        return self._planning.decision

    @property
    def held_seconds(self) -> float:
        """How long training has stood still on this rank, so far, while penstock measured, compiled and planned."""
        return self._planning.held_seconds

    def timeline(self) -> Timeline | None:
        """Return the predicted timeline of an iteration; None while profiling."""
        return self.plan.timeline if self.plan else None

    def measured_timeline(self) -> Timeline | None:
        """Return what the last iteration took on this rank: forward, backward, communication; None before the first.

        Communication is told by bucket where the host sends them; of buckets that are queued on a GPU, as a whole, by
        torch's events there.
        """
        return self._planning.measured_timeline()

    def record_instructions(self, on: bool = True) -> None:
        """Let `measured_timeline` show every encode, send, recv, merge and decode of the iterations to come.

        This looks at the clock between all of them: turn it on for an iteration that is to be drawn, then off. An
        iteration with buckets that are queued on a GPU shows none: the host does not know when its kernels run.
        """
        self._planning.record_instructions(on)

    def explain(self, picture: bool = False) -> str:
        """Say what was decided and why; with `picture`, also draw the predicted iteration above the measured one."""
        return self._planning.explain(picture)

    def bytes_sent(self) -> Traffic:
        """Return the bytes this rank has put on the wire so far, and what a dense all-reduce of the same would have."""
        return self._planning.buckets.traffic()

    def routes_used(self) -> tuple[RouteUse, ...]:
        """Return by which routes the gradients of the last iteration really travelled, with what this rank sent.

        Of a hook of the user's nothing is known.
        """
        return self._planning.buckets.routes_used()

    @property
    def exchange_memory(self) -> Memory:
        """What the exchange keeps between iterations; `optim.CompressedAdamW` has its momentum sent through it."""
        return self._planning.memory

    def exchange_state_dict(self) -> State:
        """Return what of each parameter's gradient this rank has not sent yet; call it between two iterations.

        It belongs into a checkpoint beside the model and the optimizer. Every rank has its own.
        """
        memory, servers = self._planning.memory, self._planning.buckets.servers
        if servers is not None:
            servers.collect_residuals(memory)
        return memory.state_dict(dist.get_rank(self.process_group), dist.get_world_size(self.process_group))

    def load_exchange_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over from the states of *all* ranks of an earlier run, whatever its number of ranks.

        Call it on every rank at the same step, with the same states. What is wrong with them is raised on all ranks,
        and nothing is changed then.
        """
        rank, world_size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        self._planning.memory.load_state_dicts(states, rank, world_size)
        if (sender := self._planning.buckets.sender) is not None:
            sender.exchange.recover()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out our hook, which belongs to this process; what makes the reducer registers it anew."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return state | {"_comm_hooks": [] if self._planning.buckets.has_hook_of_ours else list(self._comm_hooks)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a reducer, with the plan's buckets where there is a plan."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._planning.resume()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin_forward(self) -> None:
        self._planning.begin_forward(self.require_backward_grad_sync)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_module(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._planning.before_module(inputs, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_module(self, output: Any) -> None:
        self._planning.after_module(output)


def _with_servers(
    servers: "ParameterServers", settings: Settings, options: dict[str, Any], codec: str | None, scaler: Scaler | None
) -> Settings:
    """Return the settings by which all gradients go through servers; refuse what these cannot do."""
    if options.get("process_group") is not None or options.get("device_mesh") is not None:
        raise PlanError("servers= and a process group; leave that out: it is servers.workers, the ranks that train")
    if settings.strategy not in (AUTO, servers.strategy) or settings.engine is not None:
        other = f"strategy {settings.strategy!r}" if settings.engine is None else f"engine {settings.engine!r}"
        raise PlanError(f"servers= with {other}: servers are a strategy, over gloo; leave one of the two out")
    if scaler is not None and codec is not None:
        raise PlanError(
            "servers= with grad_scaler= and a codec: residuals of servers do not follow its scale; leave one out"
        )
    if is_low_rank(codec):
        raise PlanError(f"servers= with codec {codec!r}: servers do not know the shapes that it factors; leave one out")
    options["process_group"] = servers.workers
    return replace(settings, strategy=servers.strategy)


def _check_types(module: object, servers: object) -> None:
    """Refuse what is no model and what are no servers."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module is {module!r}; wanted a torch.nn.Module")
    if servers is not None and not hasattr(servers, "workers"):  # its module is imported by those who train with it
        raise TypeError(f"servers is {servers!r}; wanted a ParameterServers, such as ParameterServers(1)")


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    """Raise what torch would for a misspelt keyword, with the nearest name."""
    for name in options:
        if name not in _TORCH_SIGNATURE.parameters:
            near = did_you_mean(name, [*WrapperOptions.__annotations__, *signature(DistributedDataParallel).parameters])
            raise TypeError(f"DistributedDataParallel() got an unexpected keyword argument {name!r}{near}")


def _group_of(options: Mapping[str, Any]) -> dist.ProcessGroup | None:
    """Return the process group that torch's wrapper will use; None: the default one."""
    mesh = options.get("device_mesh")
    return options.get("process_group") if mesh is None else mesh.get_group(mesh_dim=0)
