"""What is read and replaced of torch's FSDP2: its groups of parameters, and what ranks of a host exchange of them.

Everything here that torch calls private stands in this file only; it is the same in torch 2.11 and 2.13. `fully_shard`
makes a group of the parameters of one module (without those of modules that were sharded before). In a backward pass
torch reduce-scatters the gradients of a group as one message. What comes of it is flat: the shards of the group's
parameters one after the other, each padded to the length of the longest on any rank:

    a weight of 5 x 4 and a bias of 5, on 2 ranks:    rank 0   weight[0:3]  bias[0:3]
                                                      rank 1   weight[3:5], 4 zeros, bias[3:5], 1 zero

Over gloo torch's own calls do more than they must (torch 2.13). Its reduce-scatter is an all-reduce, of which each rank
keeps its shard; its all-gather goes through a second copy of the weights. `HostScatter` and `HostGather` send each rank
what it lacks, from where it is to where it belongs:

    2 ranks, a layer of 16 MB       each rank sends, torch's own    here
    all-gather of weights           8 MB                            0 <-> 1: 8 MB
    reduce-scatter of gradients     16 MB                           0 <-> 1: 8 MB, then one addition

Sums of two ranks have torch's bits, since addition commutes. Sums of more are in another order than gloo's.

Where no host holds the model, these messages cross a slow link, and `send_shards_by` has them encoded:

    the same with blocks(bits=8)    all-gather and reduce-scatter   0 <-> 1: 2.04 MB each

All ranks compute with the same rounded weights; those that the optimizer steps stay as they are. Nothing makes up for
the rounding of gradients: a residual would be as large as all of them, which are cut because that is too much. NaN and
infinity arrive as NaN. In host memory only.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from penstock.codecs.registry import make_codec
from penstock.errors import PlanError

ROOT = "(root)"
_WIDE = (torch.float32, torch.bfloat16)  # types whose sums torch takes to be safe from overflow
_TAG = 0x70656E  # of our messages in torch's group, which a script may use for its own
_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
Place = Callable[[int, torch.dtype], torch.Tensor | None]  # of so many elements


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
    shards: tuple[ParameterShard, ...]  # of those that are trained when the module is sharded
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
    def ranks(self) -> int:
        """Ranks that share its parameters."""
        return int(self.of_torch.mesh_info.shard_mesh_size)

    def take_over(self, place: Place, direct: "Direct | None") -> None:
        """Have sums of gradients written where `place` says and, with `direct`, exchanged by messages of ours.

        A reduce-scatter or all-gather that the user has replaced stays as it is.
        """
        scatter, gather = self.of_torch._reduce_scatter_comm, self.of_torch._all_gather_comm
        if type(scatter).__name__ == "DefaultReduceScatter":
            sums = direct if direct is not None and direct.sums else None
            ours: Any = HostScatter(scatter, self.ranks, self.padded_numel, place, sums)
            self.module.set_custom_reduce_scatter(ours)
        if direct is not None and type(gather).__name__ == "DefaultAllGather":
            gathers: Any = HostGather(gather)
            self.module.set_custom_all_gather(gathers)

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
    """Return the groups of a module that was sharded; refuse what cannot be averaged in a hook of ours.

    A group of which nothing is trained has no shards: it may be unfrozen later.
    """
    names = {id(each): name for name, each in module.named_parameters()}
    found: dict[int, ShardGroup] = {}
    for name, each in module.named_modules():
        if isinstance(each, FSDPModule):
            for group in _groups(each, name or ROOT):
                _check(group, name or ROOT, shard_group)
                if id(group) not in found:
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
    ranks, wanted = map(dist.get_process_group_ranks, (group.mesh_info.shard_process_group, shard_group))
    if ranks != wanted:
        raise PlanError(f"module {name!r} is sharded over ranks {ranks}; wanted {wanted}, as the mesh says")
    if group._all_reduce_hook is not None:
        raise PlanError(f"module {name!r} has an all-reduce hook already; wanted none: replicas are averaged in ours")


# Parameters that tensor parallelism cuts too


def check_beside(module: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Refuse parameters that are DTensors on a mesh that has nothing to do with ours; torch would speak of strides."""
    sharded = {id(one) for each in module.modules() if isinstance(each, FSDPModule) for one in each.parameters()}
    for name, each in module.named_parameters():
        if id(each) in sharded or not isinstance(each, DTensor):
            continue
        theirs = each.device_mesh
        if theirs._get_root_mesh() != mesh._get_root_mesh():
            raise PlanError(
                f"parameter {name!r} lies on a mesh of its own, {theirs.mesh_dim_names} of ranks "
                f"{theirs.mesh.tolist()}; wanted parts of one mesh: init_device_mesh(..., mesh_dim_names="
                '("replicate", "shard", "tp")), of which fully_shard_with takes mesh["replicate", "shard"]'
            )


def groups_beside(groups: Sequence[ShardGroup], mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return this rank's groups of the dimensions that cut, or copy, parameters beside replicas and shards."""
    found: dict[str, dist.ProcessGroup] = {}
    for each in (shard for group in groups for shard in group.shards):
        theirs = each.parameter.device_mesh
        for name in set(theirs.mesh_dim_names or ()) - set(mesh.mesh_dim_names or ()):
            found[name] = theirs.get_group(name)
    return [found[name] for name in sorted(found)]


def mesh_of_all(parameter: Any, mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of replicas and of all that a parameter is cut by: with tensor parallelism three dimensions."""
    assert mesh.mesh_dim_names is not None
    theirs: DeviceMesh = parameter.device_mesh
    return mesh if theirs.ndim == 1 else DeviceMesh._concatenate([mesh[mesh.mesh_dim_names[0]], theirs])


def placements_behind(parameter: Any) -> tuple[Placement, ...]:
    """Return how a parameter is cut where its dimensions come behind one of replicas, which are cut along that."""
    return Shard(0), *map(_one_further, parameter.placements)


def _one_further(placement: Any) -> Placement:
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement


def _described(group: Any, name: str, module: FSDPModule, names: dict[int, str]) -> ShardGroup:
    shards, start = [], 0
    for each in group.fsdp_params:
        if each.sharded_param.requires_grad:
            shape = tuple(each.sharded_size)
            shards.append(ParameterShard(names[id(each.sharded_param)], start, each.sharded_size.numel(), shape, each))
            start += each.padded_sharded_param_size.numel()
    policy = group.mp_policy
    dtype = policy.reduce_dtype or policy.param_dtype or group.fsdp_params[0].sharded_param.dtype
    return ShardGroup(name, module, tuple(shards), start, dtype, group)


class Scratch:
    """Memory that is used again by each call in turn, as large as the largest of them."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for so many elements, with whatever was there."""
        if self._bytes.numel() < numel * dtype.itemsize:
            self._bytes = torch.empty(numel * dtype.itemsize, dtype=torch.uint8)
        return self._bytes[: numel * dtype.itemsize].view(dtype)


@dataclass(frozen=True, slots=True)
class Direct:
    """Messages of ours between the ranks of a host, and memory that all groups of a model use for them in turn."""

    sums: bool  # of gradients too, and not weights only
    gradients: Scratch = field(default_factory=Scratch)  # of this rank, for all
    received: Scratch = field(default_factory=Scratch)


class HostGather:
    """An all-gather of weights over gloo."""

    def __init__(self, of_torch: Any) -> None:
        self._of_torch = of_torch

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for all weights of a group."""
        found: torch.Tensor = self._of_torch.allocate(size, dtype=dtype, device=device)
        return found

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Write every rank's shard to `output_tensor`; torch waits for works of its own only."""
        if async_op or not input_tensor.numel():
            return self._of_torch(output_tensor, input_tensor, group, async_op)
        shards = output_tensor.view(group.size(), -1)
        own = shards[group.rank()]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        exchange(group, [own] * group.size(), list(shards))
        return None


class HostScatter:
    """A reduce-scatter of one group's gradients whose result is written where we say."""

    def __init__(self, of_torch: Any, ranks: int, result_numel: int, place: Place, direct: Direct | None) -> None:
        """`direct`: where parts are exchanged directly, over gloo; None: as torch does it."""
        self._of_torch, self._ranks, self._result_numel = of_torch, ranks, result_numel
        self._place, self._direct = place, direct
        self._asked = 0  # elements of gradients that memory was asked for, and not yet for their sums

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for gradients, or for their sums: that of a bucket, or new.

        torch asks for both, in this order, and for fewer or more elements where parameters have no gradient or were
        unfrozen. If the order is wrong on one rank after a pass that failed, the result is not in the bucket's memory,
        and is copied to it.
        """
        numel, place = prod(size), None
        is_result = numel * self._ranks == self._asked
        self._asked = 0 if is_result else numel
        if is_result and numel == self._result_numel:
            place = self._place(numel, dtype)
        elif not is_result and self._direct is not None and self._ranks > 1:
            place = self._direct.gradients.take(numel, dtype)
        return self._of_torch.allocate(size, dtype=dtype, device=device) if place is None else place

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Write the sum, or the average, of all ranks' parts for this rank to `output_tensor`."""
        if self._direct is None or async_op or op not in _SUMS or not output_tensor.numel():
            return self._of_torch(output_tensor, input_tensor, group, op, async_op)
        rank, ranks = group.rank(), group.size()
        parts, numel = list(input_tensor.view(ranks, -1)), output_tensor.numel()
        theirs = list(self._direct.received.take((ranks - 1) * numel, input_tensor.dtype).view(-1, numel))
        theirs.insert(rank, parts[rank])
        exchange(group, parts, theirs)
        torch.add(theirs[0], theirs[1], out=output_tensor)
        for each in theirs[2:]:
            output_tensor += each
        if op == dist.ReduceOp.AVG:
            output_tensor /= ranks
        return None


def exchange(group: dist.ProcessGroup, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
    """Send each other rank a tensor and receive one of it; both are given by rank."""
    others = [(group.rank() + step) % group.size() for step in range(1, group.size())]
    works = [dist.irecv(received[each], group=group, group_src=each, tag=_TAG) for each in others]
    works += [dist.isend(sent[each], group=group, group_dst=each, tag=_TAG) for each in reversed(others)]
    for work in works:
        assert work is not None, "this rank is one of the group"
        work.wait()


# Shards on several hosts


def check_shard_codec(
    codec: str, device_type: str, module: torch.nn.Module, policy: Any, ignored: Collection[torch.nn.Parameter]
) -> None:
    """Refuse what cannot send shards: codecs whose payloads vary in size, and messages that are not float32 here."""
    can = make_codec(codec).capabilities
    if can.variable_size or can.sums_factors:
        raise PlanError(f"shard_codec is {codec!r}, without payloads of one size; wanted one such as 'blocks(bits=8)'")
    found = [(name, dtype) for name, dtype in _sent_types(module, policy, ignored) if dtype != torch.float32]
    if device_type != "cpu" or found:
        what = f"{found[0][1]} (first: {found[0][0]!r})" if found else str(torch.float32)
        raise PlanError(
            f"shard_codec with messages of {what} on {device_type}; wanted float32 on cpu: on GPUs, or in 16 bits, "
            "give MixedPrecisionPolicy(param_dtype=torch.bfloat16) without shard_codec"
        )


def _sent_types(
    module: torch.nn.Module, policy: Any, ignored: Collection[torch.nn.Parameter]
) -> Iterator[tuple[str, torch.dtype]]:
    """Yield the types in which ranks exchange each parameter and its gradient; `policy`: of what is not yet sharded."""
    sharded = [group for each in module.modules() if isinstance(each, FSDPModule) for group in _groups(each, ROOT)]
    policies = {id(one.sharded_param): group.mp_policy for group in sharded for one in group.fsdp_params}
    left_out = {id(each) for each in ignored}
    for name, parameter in module.named_parameters():
        if id(parameter) not in left_out:
            own = policies.get(id(parameter), policy)
            gathered = own.param_dtype or parameter.dtype
            yield name, gathered
            if parameter.requires_grad:
                yield name, own.reduce_dtype or gathered


def send_shards_by(module: torch.nn.Module, codec: str) -> None:
    """Have every module inside that was sharded send weights and gradients by a codec."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            gather: Any = CodedGather(codec)
            scatter: Any = CodedScatter(codec)
            each.set_custom_all_gather(gather)
            each.set_custom_reduce_scatter(scatter)


class _Coded:
    """What both messages have in common."""

    def __init__(self, codec: str) -> None:
        self._codec = make_codec(codec)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for what is encoded or decoded."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _payloads(self, ranks: int, numel: int) -> torch.Tensor:
        """Return room for a payload of each rank."""
        return torch.empty(ranks, self._codec.max_nbytes(numel), dtype=torch.uint8)

    def _encode(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        self._codec.bind_encode(values.numpy(), None, payload.numpy())()

    def _decode(self, payload: torch.Tensor, values: torch.Tensor, adds: bool) -> None:
        self._codec.bind_decode(payload.numpy(), values.numpy(), adds)()


class CodedGather(_Coded):
    """An all-gather of weights."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Write every rank's shard, this one's too, as the codec has it; torch waits for works of its own only."""
        if async_op or not input_tensor.numel():
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        payloads = self._payloads(group.size(), input_tensor.numel())
        own = payloads[group.rank()]
        self._encode(input_tensor, own)
        exchange(group, [own] * group.size(), list(payloads))
        for payload, shard in zip(payloads, output_tensor.view(group.size(), -1), strict=True):
            self._decode(payload, shard, adds=False)
        return None


class CodedScatter(_Coded):
    """A reduce-scatter of gradients; what a rank adds for itself is not rounded."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Write the sum, or the average, of all ranks' parts for this rank to `output_tensor`."""
        if async_op or op not in _SUMS or not output_tensor.numel():
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        ranks, rank, parts = group.size(), group.rank(), input_tensor.view(group.size(), -1)
        others = [each for each in range(ranks) if each != rank]
        sent, received = (self._payloads(ranks, output_tensor.numel()) for _ in range(2))
        for each in others:
            self._encode(parts[each], sent[each])
        exchange(group, list(sent), list(received))
        output_tensor.copy_(parts[rank])
        for each in others:
            self._decode(received[each], output_tensor, adds=True)
        if op == dist.ReduceOp.AVG:
            output_tensor /= ranks
        return None
