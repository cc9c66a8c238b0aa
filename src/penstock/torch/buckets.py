"""Lets stock DistributedDataParallel hold a plan's buckets.

torch closes a bucket as soon as it holds its limit, so limits equal to the planned sizes give the planned buckets. Its
reducer cannot be given other limits once it exists: a fresh wrapper is built with them, through its public constructor,
and the living one takes its reducer over. Parameters, gradients, hooks on modules, the optimizer and the join context
stay as they are. The first iteration after a change uses buckets in registration order; torch then rebuilds them in the
order gradients become ready, and from the second iteration on they are the plan's.
"""

from collections.abc import Callable
from typing import Any

import torch

from penstock.plan import Plan

TorchDDP = torch.nn.parallel.DistributedDataParallel
Hook = tuple[Any, Callable[..., Any]]  # what register_comm_hook takes
MIB = 1 << 20
# What belongs to the living wrapper and not to its reducer: its module tree, the user's hooks on it, the join context.
_KEPT = {"_parameters", "_buffers", "_modules", "_join_config", "training", "require_backward_grad_sync"}


def trained(wrapper: TorchDDP) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters that have gradients, with their names in the module."""
    named = wrapper.module.named_parameters()
    return [(name, parameter) for name, parameter in named if parameter.requires_grad]


def gradient_nbytes(wrapper: TorchDDP) -> int:
    """Return the bytes of all gradients."""
    return sum(parameter.numel() * parameter.element_size() for _, parameter in trained(wrapper))


def bucket_limits(plan: Plan) -> list[float]:
    """Return the plan's bucket sizes in MiB, as `bucket_cap_mb_list` wants them; exact, since MiB is a power of two."""
    return [max(bucket.nbytes, 1) / MIB for bucket in plan.buckets]


def release_buckets(wrapper: TorchDDP) -> None:
    """Let the reducer go, and its buckets' memory with it; `take_buckets` must follow before the next iteration."""
    wrapper.reducer = wrapper.logger = None  # type: ignore[assignment]


def take_buckets(wrapper: TorchDDP, arguments: dict[str, Any], limits: list[float] | None, hook: Hook | None) -> None:
    """Give `wrapper` a reducer with these limits (None: torch's own) and this communication hook.

    `arguments` are those the wrapper was made with, the module excepted.
    """
    release_buckets(wrapper)  # the old reducer goes first: two must not listen to one gradient
    planned = {} if limits is None else {"bucket_cap_mb_list": limits}
    fresh = TorchDDP(wrapper.module, **{**arguments, "init_sync": False, **planned})
    if hook is not None:
        fresh.register_comm_hook(*hook)
    for name, value in vars(fresh).items():
        if name not in _KEPT and not name.endswith("_hooks") and name in vars(wrapper):
            vars(wrapper)[name] = value


def can_hold_plans(wrapper: TorchDDP) -> str:
    """Return why this wrapper cannot hold a plan, or an empty string where it can."""
    parameters = [parameter for _, parameter in trained(wrapper)]
    if len({parameter.dtype for parameter in parameters}) > 1:
        return "its parameters have several types, and torch applies bucket limits to each type by itself"
    if len({parameter.device for parameter in parameters}) > 1:
        return "its parameters are on several devices, and their gradients are timed by one clock"
    if wrapper.mixed_precision is not None:
        return "torch's mixed_precision option binds its hooks to one reducer"
    if getattr(wrapper, "_delay_all_reduce_params", None):
        return "delay_all_reduce_named_params takes parameters out of the buckets"
    return ""
