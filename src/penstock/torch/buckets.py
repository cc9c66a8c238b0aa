"""Lets stock DistributedDataParallel hold a plan's buckets, with our hook where torch's own all-reduce would not do.

torch closes a bucket as soon as it holds its limit, so limits equal to the planned sizes give the planned buckets. Its
reducer cannot be given other limits once it exists: a fresh wrapper is built with them, through its public constructor,
and the living one takes its reducer and its logger, and nothing else. What a user set on the living one stays.

torch first cuts parameters in registration order, with the limits in order, and sends the last of these buckets first.
After an iteration it rebuilds them, with the same limits, in the order gradients became ready: from then on they are
the plan's. `Order` says where it does otherwise.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from penstock.exchange.compression import NATIVE
from penstock.exchange.traffic import Traffic
from penstock.network import Network
from penstock.plan import Plan, Route
from penstock.run_record import RouteUse
from penstock.runtime.transport import ring_nbytes
from penstock.torch.checkpoint import TorchMemory
from penstock.torch.engines import engine_of, message_seconds
from penstock.torch.hook import BucketSender, NativeAverage

if TYPE_CHECKING:
    from penstock.torch.servers import ParameterServers

TorchDDP = torch.nn.parallel.DistributedDataParallel
MIB = 1 << 20
# What a reducer brings with it: itself, its logger, and how far it has got. Limits stay the user's: torch.compile reads
# them to split graphs.
_OF_THE_REDUCER = ("reducer", "logger", "_has_rebuilt_buckets", "_static_graph_delay_allreduce_enqueued")
# Arguments of torch's constructor that its reducer and its logger are made from.
_SHAPES_THE_REDUCER = (
    "device_ids", "output_device", "broadcast_buffers", "forward_sync_buffers", "bucket_cap_mb", "bucket_cap_mb_list",
    "gradient_as_bucket_view", "skip_all_reduce_unused_params", "batched_grad_copy",
)  # fmt: skip


class Order(Enum):
    """In which order torch's reducer sends parameters, from the second iteration on."""

    READY = "as gradients become ready"
    LAST_REGISTERED_FIRST = "last registered first"  # with find_unused_parameters: never rebuilt
    REGISTERED = "as registered"  # of a static graph: rebuilt without looking at when gradients became ready


@dataclass(frozen=True, slots=True)
class Hook:
    """A communication hook as torch registers it: a function with its state, or one of torch's built-in hooks."""

    function: Callable[..., Any] | None
    state: object = None
    builtin: Any = None  # dist.BuiltinCommHookType
    is_torchs: bool = False  # torch's wrapper registered it by itself, for one of its options

    def register(self, wrapper: TorchDDP) -> None:
        """Register it with a wrapper of torch's."""
        if self.function is None:
            TorchDDP._register_builtin_comm_hook(wrapper, self.builtin)  # type: ignore[no-untyped-call]
        else:
            TorchDDP.register_comm_hook(wrapper, self.state, self.function)

    def check(self, wrapper: TorchDDP) -> None:
        """Raise what torch would when it is registered; torch's built-in hooks are right."""
        if self.function is not None:
            wrapper._check_comm_hook(self.function)  # type: ignore[no-untyped-call]

    @property
    def may_keep_state_by_bucket(self) -> bool:
        """Whether other buckets could break it. torch's own averaging hooks have a process group as state, or None."""
        return not (self.is_torchs or self.function is None or isinstance(self.state, dist.ProcessGroup | None))


@dataclass(frozen=True, slots=True)
class Averaged:
    """A parameter whose gradient torch's reducer averages."""

    name: str  # in the wrapped module
    parameter: torch.nn.Parameter
    is_sparse: bool  # its gradients are, and so in no planned bucket

    @property
    def nbytes(self) -> int:
        """Bytes of its gradient, if it is dense."""
        return self.parameter.numel() * self.parameter.element_size()


Parameters = tuple[Averaged, ...]  # as registered


def averaged(wrapper: TorchDDP) -> Parameters:
    """Return all parameters that the reducer of a new wrapper averages; tensor parallelism hides some of them later.

    Shared ones are there once. Those that the module tells DDP to ignore are not.
    """
    names = {id(parameter): name for name, parameter in wrapper.module.named_parameters()}
    parameters, sparse = wrapper._build_params_for_reducer()  # type: ignore[no-untyped-call]
    return tuple(Averaged(names[id(each)], each, is_sparse) for each, is_sparse in zip(parameters, sparse, strict=True))


def dense(parameters: Parameters) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that are in buckets, by name."""
    return {each.name: each.parameter for each in parameters if not each.is_sparse}


def gradient_nbytes(parameters: Parameters) -> int:
    """Return the bytes of all dense gradients."""
    return sum(each.nbytes for each in parameters if not each.is_sparse)


def bucket_limits(plan: Plan, order: Order) -> list[float]:
    """Return the plan's bucket sizes in MiB, as `bucket_cap_mb_list` wants them; exact, since MiB is a power of two.

    Buckets that are not rebuilt are cut from the first registered parameter on, which the plan has last.
    """
    limits = [max(bucket.nbytes, 1) / MIB for bucket in plan.buckets]
    return limits[::-1] if order is Order.LAST_REGISTERED_FIRST else limits


def sending_order(wrapper: TorchDDP) -> Order:
    """Return in which order this wrapper's reducer sends its parameters."""
    if wrapper.static_graph:
        return Order.REGISTERED
    return Order.LAST_REGISTERED_FIRST if wrapper.find_unused_parameters else Order.READY


def release_buckets(wrapper: TorchDDP) -> None:
    """Let the reducer go, and its buckets' memory with it; `take_buckets` must follow before the next iteration."""
    wrapper.reducer = wrapper.logger = None  # type: ignore[assignment]


def take_buckets(
    wrapper: TorchDDP,
    parameters: Parameters,
    arguments: Mapping[str, Any],
    limits: list[float] | None,
    hook: Hook | None,
) -> None:
    """Give `wrapper` a reducer with these limits (None: torch's own) and this communication hook.

    `parameters` are those that its reducer averages. `arguments` are those the wrapper was made with, the module
    excepted; what can change later is read from it.
    """
    release_buckets(wrapper)  # the old reducer goes first: two must not listen to one gradient
    fresh = _fresh_wrapper(wrapper, parameters, arguments, {} if limits is None else {"bucket_cap_mb_list": limits})
    if hook is not None:
        hook.register(fresh)
        wrapper._comm_hooks = list(fresh._comm_hooks)
    for name in _OF_THE_REDUCER:
        if name in vars(fresh):
            vars(wrapper)[name] = vars(fresh)[name]
    if wrapper.mixed_precision is not None:
        wrapper.reducer._set_mixed_precision_param_dtype(wrapper.mixed_precision.param_dtype)  # type: ignore[attr-defined]
    if wrapper._lazy_init_ran and steps_in_backward(wrapper):
        wrapper.reducer._set_optimizer_in_backward()  # type: ignore[attr-defined]


def _fresh_wrapper(
    wrapper: TorchDDP, parameters: Parameters, arguments: Mapping[str, Any], limits: dict[str, list[float]]
) -> TorchDDP:
    """Return a wrapper of the same module and ranks with a reducer like the living one's, but for its limits."""

    class Fresh(TorchDDP):
        def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
            self._assign_modules_buffers()  # type: ignore[no-untyped-call]
            return [each.parameter for each in parameters], [each.is_sparse for each in parameters]

        def _build_debug_param_to_name_mapping(self, _: object) -> dict[int, str]:
            return {index: each.name for index, each in enumerate(parameters)}

    given = {name: arguments[name] for name in _SHAPES_THE_REDUCER if name in arguments}
    now = {
        "process_group": wrapper.process_group,
        "find_unused_parameters": wrapper.find_unused_parameters,
        "static_graph": wrapper.static_graph,
        "init_sync": False,
    }
    with warnings.catch_warnings(), thawed(parameters):
        warnings.simplefilter("ignore")  # torch has said them once, when the user's own wrapper was made
        return Fresh(wrapper.module, **{**given, **now, **limits})


@contextmanager
def thawed(parameters: Parameters) -> Iterator[None]:
    """Let all parameters require gradients, also those frozen for a while: others take no hook, nor does a reducer.

    What is hooked so keeps its hook when it is frozen again, as parameters do that are frozen after they were wrapped.
    """
    frozen = [each.parameter for each in parameters if not each.parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def steps_in_backward(wrapper: TorchDDP) -> bool:
    """Whether optimizers step during the backward pass (`_apply_optimizer_in_backward`)."""
    return any(hasattr(each, "_in_backward_optimizers") for each in wrapper.parameters())


def calls_no_hook(wrapper: TorchDDP) -> str:
    """Return why torch averages gradients of this wrapper without its communication hook, or an empty string."""
    if wrapper._use_python_reducer:
        return "torch._dynamo's optimize_ddp='python_reducer', which averages gradients without buckets"
    if wrapper._delay_all_reduce_params:
        return "delay_all_reduce_named_params, which takes parameters out of the buckets"
    return ""


def can_hold_plans(wrapper: TorchDDP, parameters: Parameters) -> str:
    """Return why this wrapper cannot hold a plan, or an empty string where it can."""
    if obstacle := calls_no_hook(wrapper):
        return f"of {obstacle}"
    found = dense(parameters).values()
    if not found:
        return "all its gradients are sparse, and travel as torch sends them"
    if len({parameter.dtype for parameter in found}) > 1:
        return "its parameters have several types, and torch applies bucket limits to each type by itself"
    if len({parameter.device for parameter in found}) > 1:
        return "its parameters are on several devices, and their gradients are timed by one clock"
    return ""


class PlannedBuckets:
    """The buckets of one wrapper, and the hook that sends them.

    torch's own all-reduce does where the plan asks for nothing else. A codec, momentum, clipping or another engine
    needs a hook of ours, from the first iteration on; a hook of the user's goes before it.
    """

    def __init__(
        self,
        wrapper: TorchDDP,
        arguments: dict[str, Any],
        memory: TorchMemory,
        engine: str | None,
        is_watched: bool,
        servers: "ParameterServers | None" = None,
    ) -> None:
        """`arguments` are those that torch's wrapper was made with; `is_watched`: drift is, at every iteration."""
        self.user_hook: Hook | None = None
        self.user_sample_rate: int | None = None  # of torch's clocks, where the user set it
        self.logged_before = 0  # iterations that loggers of earlier reducers counted
        self._wrapper, self._arguments, self._memory = wrapper, arguments, memory
        self.parameters = averaged(wrapper)
        self._engine, self._is_watched, self.servers = engine, is_watched, servers
        self._sender: BucketSender | None = None
        self._average: NativeAverage | None = None  # our hook where torch averages, from the first forward pass on
        self._torch_divides = False  # a `join` was entered in which torch divides by the ranks that have data
        self._limits: list[float] | None = None  # of the buckets; None: torch's own
        self._plan: Plan | None = None
        self._counted = 0  # iterations
        self._traffic = Traffic(0, 0)  # of iterations that torch communicated by itself

    @property
    def sender(self) -> BucketSender | None:
        """Our hook; None where torch's own all-reduce, or a hook of the user's, averages buckets."""
        return self._sender

    def traffic(self) -> Traffic:
        """Return what this rank has sent so far."""
        return self._traffic + (self._sender.bytes_sent() if self._sender else Traffic(0, 0))

    def routes_used(self) -> tuple[RouteUse, ...]:
        """Return what each route carried in the last iteration; by a hook of the user's, that is not known."""
        if self._sender is not None:
            return self._sender.exchange.routes_used()
        if self.user_hook is not None or not self._counted:
            return ()
        nbytes = gradient_nbytes(self.parameters)
        return (RouteUse(NATIVE, 1, nbytes, ring_nbytes(nbytes, self._world_size)),)

    def hang_up(self) -> None:
        """Let ranks fail that wait for our buckets; nothing can be sent afterwards."""
        if self._sender is not None:
            self._sender.exchange.hang_up()

    def count_iteration(self) -> None:
        """Count an iteration, and what torch sent of it, where it did."""
        self._counted += 1
        if self._sender is None:
            nbytes = ring_nbytes(gradient_nbytes(self.parameters), self._world_size)
            self._traffic += Traffic(nbytes, nbytes)

    def hold(self, plan: Plan, network: Network | None = None) -> None:
        """Make the plan's buckets, one of each bulk; `network` is what it was made from."""
        self._plan = plan = plan.merged
        ours = not plan.overlap or any(bucket.route != Route(NATIVE) for bucket in plan.buckets)
        hook = self.user_hook
        if hook is None and (ours or self._always_ours):
            self._sender = self._sender or self._make_sender(Route(NATIVE))
            self._sender.follow(plan, network)
            hook = Hook(self._sender.hook)
        elif self._sender is not None:
            self._sender.close()
            self._traffic, self._sender = self.traffic(), None
        self._take(bucket_limits(plan, sending_order(self._wrapper)), hook)

    def keep(self, route: Route) -> None:
        """Leave torch's own buckets as they are and send all of them by one route."""
        if self.user_hook is None and (route != Route(NATIVE) or self._always_ours):
            if self._sender is None:
                self._sender = self._make_sender(route)
                hook = Hook(self._sender.hook)
                hook.register(self._wrapper) if self._average is None else self._take(self._limits, hook)
            self._sender.exchange.send_others_by(route)
        self.time_iterations()

    def register(self, hook: Hook) -> None:
        """Register a hook of the user's, in the place of ours where a plan brought one; all ranks together."""
        if self._sender is None and self._average is None:
            hook.register(self._wrapper)
            self.user_hook = hook
        elif self._sender is None:
            hook.check(self._wrapper)
            self._average, self.user_hook = None, hook
            self._take(self._limits, hook)
        else:
            hook.check(self._wrapper)
            self.user_hook = hook
            assert self._plan is not None
            self.hold(self._plan)

    def name_lost_ranks(self) -> None:
        """Have a lost connection name a rank where torch averages buckets by itself; where it has no hook yet.

        On a GPU errors come from NCCL's watchdog, and every call of a hook would hold up what launches kernels.
        """
        wrapper = self._wrapper
        by_gloo = wrapper.device.type == "cpu" and engine_of(wrapper.process_group, wrapper.device) == "gloo"
        takes_hook = not calls_no_hook(wrapper) and not steps_in_backward(wrapper) and self.user_hook is None
        if self._average is None and self._world_size > 1 and by_gloo and takes_hook and not self._torch_divides:
            self._average = NativeAverage(wrapper.process_group)
            if self._sender is None:
                Hook(self._average.hook).register(wrapper)

    def leave_to_torch(self) -> None:
        """Have torch average buckets without any hook of ours: in `join` it may divide by the ranks that have data."""
        self._torch_divides = True
        if self._average is not None:
            self._average = None
            self._take(self._limits, self.user_hook)

    @property
    def has_hook_of_ours(self) -> bool:
        """Whether the hook that torch calls is ours, and belongs to this process."""
        return self._sender is not None or self._average is not None

    def take_back(self) -> None:
        """Make torch's own buckets again, after they were released."""
        ours = None if self._sender is None else Hook(self._sender.hook)
        self._take(None, self.user_hook or ours)

    def forget(self) -> None:
        """Drop the plan and our hook: the process group is another one, whose ranks plan anew."""
        self._traffic = self.traffic()
        if self._sender is not None:
            self._sender.exchange.close()  # without the other ranks, some of which may be gone
        self._plan = self._sender = self._average = None
        self._take(None, self.user_hook)

    def time_iterations(self) -> None:
        """Have torch time every iteration, or as often as the user said.

        On a GPU it waits for the device then: only where drift is watched. Otherwise the first ten and every hundredth.
        """
        if "reducer" not in vars(self._wrapper):
            return  # all gradients are delayed by torch's own option, and nothing is timed
        if self.user_sample_rate is not None:
            self._wrapper.reducer._set_ddp_runtime_logging_sample_rate(self.user_sample_rate)
        elif self._wrapper.device.type == "cpu" or self._is_watched:
            self._wrapper.reducer._set_ddp_runtime_logging_sample_rate(1)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: the communication thread."""
        return vars(self) | {"_sender": None, "_average": None, "_traffic": self.traffic(), "parameters": ()}

    def resume(self) -> None:
        """Take the parameters of a wrapper that was copied or unpickled."""
        self.parameters = averaged(self._wrapper)

    def _take(self, limits: list[float] | None, hook: Hook | None) -> None:
        self._memory.know_parameters(
            {each.name: each.parameter for each in self.parameters}
        )  # as they lie in memory now
        self._limits = limits
        if hook is None and self._average is not None:
            hook = Hook(self._average.hook)
        take_buckets(self._wrapper, self.parameters, self._arguments, limits, hook)
        self.logged_before = self._counted
        self.time_iterations()

    @property
    def _always_ours(self) -> bool:
        """Whether torch's own all-reduce would not do, whatever the plan says."""
        memory = self._memory
        return memory.compression.momentum.is_used or memory.compresses or self._engine is not None

    @property
    def _world_size(self) -> int:
        return dist.get_world_size(self._wrapper.process_group)

    def _make_sender(self, otherwise: Route) -> BucketSender:
        names = {id(each.parameter): each.name for each in self.parameters}
        leaves_out, group = self._wrapper.find_unused_parameters, self._wrapper.process_group
        seconds, engine, servers = message_seconds(group), self._engine, self.servers
        return BucketSender(group, seconds, otherwise, self._memory, names, leaves_out, engine, servers=servers)
