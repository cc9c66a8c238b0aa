"""What is read of torch's FSDP2: its groups of parameters, and where their shards lie in what a reduce-scatter gives.

Everything here that torch calls private stands in this file only; it is the same in torch 2.11 and 2.13. `fully_shard`
makes a group of the parameters of one module (without those of modules that were sharded before). In a backward pass
torch reduce-scatters the gradients of a group as one message. What comes of it is flat: the shards of the group's
parameters one after the other, each padded to the length of the longest on any rank:

    a weight of 5 x 4 and a bias of 5, on 2 ranks:    rank 0   weight[0:3]  bias[0:3]
                                                      rank 1   weight[3:5], 4 zeros, bias[3:5], 1 zero
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from penstock.errors import PlanError

ROOT = "(root)"
_WIDE = (torch.float32, torch.bfloat16)  # types whose sums torch takes to be safe from overflow


@dataclass(frozen=True, slots=True, eq=False)
class ParameterShard:
    """This rank's part of one parameter."""

    name: str  # of the parameter, in the module
    start: int  # its first element in what its group's reduce-scatter gives
    numel: int  # elements, without padding
    shape: tuple[int, ...]
    of_torch: Any  # torch's FSDPParam

    @property
    def parameter(self) -> Any:
        """The DTensor that optimizers step; torch may make it anew before the first forward pass."""
        return self.of_torch.sharded_param

    @property
    def gradient(self) -> torch.Tensor | None:
        """The part of its gradient that is here."""
        found = self.parameter.grad
        return None if found is None else found.to_local()


@dataclass(frozen=True, slots=True, eq=False)
class ShardGroup:
    """Parameters whose gradients torch reduce-scatters together."""

    name: str  # of the module
    module: FSDPModule
    shards: tuple[ParameterShard, ...]  # of those that are trained
    padded_numel: int  # of what a reduce-scatter gives: the same on all ranks
    dtype: torch.dtype  # in which gradients are summed
    of_torch: Any  # torch's FSDPParamGroup

    @property
    def numel(self) -> int:
        """Elements of its shards, without padding."""
        return sum(each.numel for each in self.shards)

    @property
    def padded_nbytes(self) -> int:
        """Bytes of what a reduce-scatter gives."""
        return self.padded_numel * self.dtype.itemsize

    @property
    def is_padded(self) -> bool:
        """Whether there is anything but shards in what a reduce-scatter gives."""
        return self.numel != self.padded_numel

    @property
    def can_choose_memory(self) -> bool:
        """Whether torch's own reduce-scatter is used, and what it reads can be told from what it writes by its size."""
        is_own = type(self.reduce_scatter).__name__ == "DefaultReduceScatter"
        return is_own and self.of_torch.mesh_info.shard_mesh_size > 1

    @property
    def reduce_scatter(self) -> Any:
        """What sums gradients inside a host; None in versions of torch where that cannot be replaced."""
        return vars(self.of_torch).get("_reduce_scatter_comm")

    @property
    def sends(self) -> bool:
        """Whether replicas are averaged in this pass; `set_requires_all_reduce(False)` puts that off."""
        return bool(self.of_torch.all_reduce_grads)

    @property
    def scatter_stream(self) -> Any:
        """The stream on which torch sums this group's gradients inside a host; on a CPU it stands for nothing."""
        return self.of_torch.comm_ctx.reduce_scatter_stream

    @property
    def written(self) -> Any:
        """The event behind which torch has written this pass's gradients; None: it was waited for."""
        return self.of_torch._post_reduce_event

    @property
    def is_stepped_in_backward(self) -> bool:
        """Whether hooks of the user's want the average as soon as torch has written the gradient."""
        return any(each.parameter._post_accumulate_grad_hooks for each in self.shards)

    def divided_afterwards(self, dtype: torch.dtype) -> float:
        """Return what torch divides by once the hook has returned, as sums of `dtype` are scaled; 1: nothing.

        torch divides 16-bit floats of little range partly before and partly after it has summed them, and all types
        afterwards where it is told to use sums only.
        """
        group = self.of_torch
        if dtype in _WIDE and not group.force_sum_reduction_for_comms:
            return 1.0
        factor = float(group.gradient_divide_factor or group.mesh_info.shard_mesh_size)
        before = 1.0
        while dtype not in _WIDE and factor % before == 0 and factor / before > before:
            before *= 2
        return factor / before


def groups_of(module: torch.nn.Module, shard_group: dist.ProcessGroup) -> tuple[ShardGroup, ...]:
    """Return the groups of a module that was sharded; refuse what cannot be averaged in a hook of ours."""
    names = {id(each): name for name, each in module.named_parameters()}
    found: dict[int, ShardGroup] = {}
    for name, each in module.named_modules():
        if isinstance(each, FSDPModule):
            for group in _groups(each, name or ROOT):
                _check(group, name or ROOT, shard_group)
                if id(group) not in found and any(one.sharded_param.requires_grad for one in group.fsdp_params):
                    found[id(group)] = _described(group, name or ROOT, each, names)
    return tuple(found.values())


def _groups(module: FSDPModule, name: str) -> list[Any]:
    """Return torch's groups of one module: at most one where we can go on."""
    state = module._get_fsdp_state()
    several = vars(state).get("_fsdp_param_groups")  # torch 2.11 has room for one only
    groups = [state._fsdp_param_group] if several is None else list(several)
    if len(groups) > 1:
        raise PlanError(
            f"module {name!r} has parameters on {len(groups)} meshes, and torch has no hook for such ones; shard "
            "modules whose parameters lie on another mesh by themselves"
        )
    return [each for each in groups if each is not None]


def _check(group: Any, name: str, shard_group: dist.ProcessGroup) -> None:
    """Refuse a group that torch averages over replicas itself, or whose hook is taken."""
    if group._is_hsdp:
        raise PlanError(
            f"module {name!r} was sharded on the whole mesh, so torch averages its replicas; shard it on the shard "
            'dimension only: fully_shard(layer, mesh=mesh["shard"])'
        )
    ranks, wanted = (dist.get_process_group_ranks(each) for each in (_shard_ranks(group), shard_group))
    if ranks != wanted:
        raise PlanError(f"module {name!r} is sharded over ranks {ranks}; wanted {wanted}, as the mesh says")
    if group._all_reduce_hook is not None:
        raise PlanError(f"module {name!r} has an all-reduce hook already; wanted none: replicas are averaged in ours")


def _shard_ranks(group: Any) -> dist.ProcessGroup:
    found: dist.ProcessGroup = group.mesh_info.shard_process_group
    return found


def _described(group: Any, name: str, module: FSDPModule, names: dict[int, str]) -> ShardGroup:
    shards, start = [], 0
    for each in group.fsdp_params:
        if each.sharded_param.requires_grad:
            shape = tuple(each.sharded_size)
            shards.append(ParameterShard(names[id(each.sharded_param)], start, each.sharded_size.numel(), shape, each))
            start += each.padded_sharded_param_size.numel()
    policy = group.mp_policy
    dtype = policy.reduce_dtype or policy.param_dtype or shards[0].parameter.dtype
    return ShardGroup(name, module, tuple(shards), start, dtype, group)
