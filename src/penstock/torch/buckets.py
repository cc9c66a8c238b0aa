"""Lets stock DistributedDataParallel hold a plan's buckets.

torch closes a bucket as soon as it holds its limit, so limits equal to the planned sizes give the planned buckets. Its
reducer cannot be given other limits once it exists: a fresh wrapper is built with them, through its public constructor,
and the living one takes its reducer and its logger, and nothing else. What a user set on the living one stays.

torch first cuts parameters in registration order, with the limits in order, and sends the last of these buckets first.
After an iteration it rebuilds them, with the same limits, in the order gradients became ready: from then on they are
the plan's. `Order` says where it does otherwise.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from penstock.plan import Plan

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
    with warnings.catch_warnings():  # torch has said them once, when the user's own wrapper was made
        warnings.simplefilter("ignore")
        return Fresh(wrapper.module, **{**given, **now, **limits})


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
