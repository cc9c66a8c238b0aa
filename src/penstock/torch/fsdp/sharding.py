"""`fully_shard_with`: torch's FSDP2 inside hosts, our exchange between them.

    mesh = init_device_mesh("cuda", (hosts, gpus), mesh_dim_names=("replicate", "shard"))
    fully_shard_with(model, mesh, layers=TransformerBlock, codec="blocks(bits=4)")
    optimizer = torch.optim.AdamW(model.parameters())

The module is sharded by torch's own `fully_shard`, on the mesh's shard dimension only, and stays an `FSDPModule` of
torch with everything that can do. Gradients are averaged over the replicate dimension in torch's all-reduce hook.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from penstock.codecs.codec import Codec
from penstock.errors import PlanError
from penstock.exchange.compression import NATIVE, Compression, Scheme, from_options, refuse_factors
from penstock.exchange.parameter_state import Memory, Scaler
from penstock.exchange.residuals import Layout
from penstock.exchange.state import State
from penstock.exchange.traffic import Traffic
from penstock.plan import Plan, Route
from penstock.planning.planning import Decision, Planning, Settings
from penstock.run_record import RouteUse
from penstock.runtime.transport.c10d import group_timeout
from penstock.timeline import Timeline
from penstock.torch.check_inputs import compare_ranks
from penstock.torch.checkpoint import TorchMemory
from penstock.torch.engines import engine_of, new_group, own_transport
from penstock.torch.fsdp.groups import (
    Direct,
    ShardGroup,
    check_beside,
    check_shard_codec,
    groups_beside,
    groups_of,
    send_shards_by,
)
from penstock.torch.fsdp.replica_planning import UNPLANNED, ReplicaPlanning, route_without_a_plan
from penstock.torch.fsdp.replicas import ReplicaAverage
from penstock.torch.fsdp.sharded_state import KEY, ShardedState
from penstock.torch.watch import OptimizerWatch
from penstock.torch.wrapper_planning import compile_ahead

Layers = type[torch.nn.Module] | Sequence[type[torch.nn.Module]] | Callable[[str, torch.nn.Module], bool]
_OF_TORCH = ("reshard_after_forward", "shard_placement_fn", "mp_policy", "offload_policy", "ignored_params")
_HELD = "_penstock_replicas"  # attribute of a module


class ShardedModule:
    """What `fully_shard_with` adds to a module, beside torch's `FSDPModule`: the methods of our DDP wrapper."""

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None while profiling."""
        return _held(self).planning.plan

    @property
    def decision(self) -> Decision | None:
        """The plan in force with the trace and the network it was made from; None while profiling."""
        return _held(self).planning.decision

    @property
    def held_seconds(self) -> float:
        """How long training has stood still on this rank, so far, while penstock measured, compiled and planned."""
        return _held(self).planning.voice.held_seconds

    def timeline(self) -> Timeline | None:
        """Return the predicted timeline of an iteration; None while profiling."""
        return self.plan.timeline if self.plan else None

    def measured_timeline(self) -> Timeline | None:
        """Return what the last iteration took on this rank; None before the first one is over, and on a GPU."""
        return _held(self).planning.measured_timeline()

    def record_instructions(self, on: bool = True) -> None:
        """Let `measured_timeline` show every encode, send, recv, merge and decode of the iterations to come."""
        _held(self).averages.exchange.record(on)

    def explain(self, picture: bool = False) -> str:
        """Say what was decided and why; with `picture`, also draw the predicted iteration above the measured one."""
        return _held(self).planning.explain(picture)

    def bytes_sent(self) -> Traffic:
        """Return the bytes this rank has sent to other replicas so far, and what a dense all-reduce would have."""
        return _held(self).averages.exchange.traffic()

    def routes_used(self) -> tuple[RouteUse, ...]:
        """Return by which routes the gradients of the last iteration travelled between replicas."""
        return _held(self).averages.exchange.routes_used()

    @property
    def exchange_memory(self) -> Memory:
        """What the exchange keeps between iterations; `optim.CompressedAdamW` has its momentum sent through it."""
        return _held(self).state.memory

    @property
    def replica_group(self) -> dist.ProcessGroup:
        """The ranks that have the same shards as this one."""
        return _held(self).averages.replicas

    def exchange_state_dict(self) -> State:
        """Return what all replicas have not sent yet, as DTensors, for `torch.distributed.checkpoint.save`.

        Call it between iterations, on every rank.
        """
        return _held(self).state.save()

    def exchange_state_to_load(self, checkpoint: str | PathLike[str] | StorageReader, key: str = KEY) -> State:
        """Return zeros shaped as a checkpoint holds them under `key`, for `torch.distributed.checkpoint.load`.

        The checkpoint may be of another mesh.
        """
        return _held(self).state.to_load(checkpoint, key)

    def reset_iter_state(self) -> None:
        """Give up an iteration that failed, as torch's own (2.13) does, and what replicas were to average after it."""
        super().reset_iter_state()  # type: ignore[misc]
        _held(self).averages.forget_unaveraged()

    def load_exchange_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over from a state that was loaded; call it on every rank at the same step."""
        _held(self).state.load(state)
        _held(self).averages.exchange.recover()


@dataclass(frozen=True, eq=False)
class _Held:
    """What belongs to one sharded model."""

    averages: ReplicaAverage
    planning: ReplicaPlanning
    state: ShardedState
    optimizer: OptimizerWatch

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_forward(self, *_: Any) -> None:
        """Go on with profiling and planning between two iterations; an evaluation is none."""
        if torch.is_grad_enabled():
            self.planning.before_forward()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after_forward(self, *_: Any) -> None:
        """Note when the forward pass has ended."""
        if torch.is_grad_enabled():
            self.planning.after_forward()


def fully_shard_with(
    module: torch.nn.Module,
    mesh: DeviceMesh,
    *,
    codec: str | Codec | None = None,
    compression: Compression | None = None,
    planning: Planning | None = None,
    layers: Layers | None = None,
    shard_codec: str | None = None,
    on_nonfinite: str = "raise",
    grad_scaler: Scaler | None = None,
    **options: Any,
) -> Any:
    """Shard a module over the second dimension of a mesh, and average its gradients over the first; return the module.

    Without any of codec, compression and planning, every group of parameters is averaged as in torch's own HSDP, to the
    bit, but while the backward pass goes on.

    Args:
        module: The model to shard.
        mesh: Two named dimensions, replicas by shards, as torch's own HSDP takes it. All its ranks must call this.
        codec: What compresses gradients between replicas, as in `DistributedDataParallel`.
        compression: The codec with its settings.
        planning: How messages between replicas are planned.
        layers: Modules inside that are sharded by themselves: a class, several, or a function of name and module. Those
            that were sharded before (by `fully_shard(layer, mesh=mesh["shard"])`) stay as they are.
        shard_codec: What compresses weights and gradients between the ranks of one replica, such as `blocks(bits=8)`:
            for shards that lie on several hosts, over gloo. It has no feedback.
        on_nonfinite: What a compressed gradient with NaN or infinity does, on all ranks: raise or skip.
        grad_scaler: The scaler of the training loop, whose scale residuals follow.
        **options: Fields of `Compression` and `Planning` by themselves, and torch's own, of `fully_shard`, for all
            modules that are sharded here.
    """
    asks = codec is not None or compression is not None or planning is not None
    options |= {} if codec is None else {"codec": codec}
    asks |= bool({each.name for kind in (Compression, Planning) for each in fields(kind)} & set(options))
    scheme = from_options(Compression, compression, "compression", options).scheme()
    settings = from_options(Planning, planning, "planning", options).settings(races=False)
    _check_options(scheme, settings, options)
    _check_mesh(mesh)
    _check_module(module)
    check_beside(module, mesh)
    if shard_codec is not None:
        policy, ignored = options.get("mp_policy", MixedPrecisionPolicy()), options.get("ignored_params") or ()
        check_shard_codec(shard_codec, mesh.device_type, module, policy, ignored)
    memory = TorchMemory(scheme, on_nonfinite, grad_scaler)
    everyone = _all_ranks(mesh)
    compare_ranks(_compared(mesh, settings, memory, options | {"shard_codec": shard_codec}), module, everyone)
    compiling = compile_ahead(module, settings, scheme, mesh.size(0))
    shards, replicas = mesh.get_group(1), mesh.get_group(0)
    _shard(module, mesh, layers, options)
    if shard_codec is not None:
        send_shards_by(module, shard_codec)
    everything = groups_of(module, shards)
    groups = tuple(each for each in everything if each.shards)
    if not groups:
        raise PlanError("the module has no parameter that is trained; nothing is averaged: use torch's fully_shard")
    memory.know({each.name: Layout.contiguous(each.shape) for group in groups for each in group.shards})
    obstacle = _obstacle(groups, asks)
    device = _device(mesh)
    otherwise = route_without_a_plan(scheme, settings.strategy, replicas, device)
    direct = Direct(sums=asks or mesh.size(1) == 2) if engine_of(shards, device) == "gloo" else None
    beside, name = groups_beside(groups, mesh), type(module).__name__.removeprefix("FSDP")
    others = tuple(own_transport(None, each) for each in (shards, *beside) if each.size() > 1)
    route = otherwise if obstacle else Route(NATIVE)
    averages = ReplicaAverage(everything, replicas, memory, route, device, direct, others)
    speaks = dist.get_rank(everyone) == 0 and not any(map(dist.get_rank, beside))
    plans = ReplicaPlanning(averages, name, (shards, *beside), settings, memory, compiling, obstacle, speaks)
    watch = OptimizerWatch(module.parameters(), memory, scheme.named, speaks)
    _attach(module, _Held(averages, plans, ShardedState(memory, groups, mesh, everyone), watch))
    return module


def _check_options(scheme: Scheme, settings: Settings, options: Mapping[str, Any]) -> None:
    """Refuse options that are unknown, or that mean something else where each rank has a part of each tensor."""
    if unknown := [each for each in options if each not in _OF_TORCH]:
        raise TypeError(f"fully_shard_with() got an unexpected keyword argument {unknown[0]!r}")
    scheme.check_strategy(settings.strategy)
    scheme.check_planner(settings.planner)
    scheme.refuse_parts("with shards: a rank knows the entries of its own part only")
    if scheme.momentum.clip is not None:
        raise PlanError(
            "clip= with shards: a rank knows the norm of its own part only; use torch.nn.utils.clip_grad_norm_, which "
            "adds up the norms of all parts"
        )
    refuse_factors(scheme, settings.plan, "fully_shard_with")


def _check_mesh(mesh: object) -> None:
    """Refuse what is not replicas by shards."""
    wanted = 'init_device_mesh("cuda", (hosts, gpus), mesh_dim_names=("replicate", "shard"))'
    if not isinstance(mesh, DeviceMesh):
        raise PlanError(f"mesh is {mesh!r}; wanted a DeviceMesh of two dimensions, such as {wanted}")
    if mesh.ndim != 2:
        raise PlanError(
            f"mesh has {mesh.ndim} dimension{'' if mesh.ndim == 1 else 's'}, {tuple(mesh.mesh.shape)}; wanted two, "
            f"replicas by shards: {wanted}. Without replicas, torch's fully_shard does all there is"
        )
    if not mesh.mesh_dim_names:
        raise PlanError(f"mesh has no names for its dimensions, by which they are told apart; wanted {wanted}")
    if mesh.device_type not in ("cpu", "cuda"):
        raise PlanError(f"mesh is on {mesh.device_type!r}; wanted cpu or cuda, where our exchange works")


def _check_module(module: object) -> None:
    if not isinstance(module, torch.nn.Module):
        raise PlanError(f"module is {type(module).__name__}; wanted one torch.nn.Module, the whole model")
    if isinstance(module, ShardedModule):
        raise PlanError("the module was given to fully_shard_with before; its replicas are averaged already")
    own = [each for each in vars(ShardedModule) if not each.startswith("_") and not hasattr(FSDPModule, each)]
    if taken := [each for each in own if hasattr(module, each)]:
        raise PlanError(
            f"the module has an attribute {taken[0]!r} of its own, and fully_shard_with adds {', '.join(own)}; rename "
            "it, or shard a module around it"
        )


def _all_ranks(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return a group of all ranks of a mesh; None: the default one."""
    if mesh.size() == dist.get_world_size():
        return None
    assert dist.group.WORLD is not None  # its timeout is the user's; groups of a mesh have torch's own
    return new_group(mesh.mesh.flatten().tolist(), mesh.get_group(0), group_timeout(dist.group.WORLD))


def _compared(
    mesh: DeviceMesh, settings: Settings, memory: TorchMemory, options: Mapping[str, Any]
) -> Mapping[str, str]:
    """Return what all ranks must have been given, as text."""
    given = {
        "plan": settings.plan and settings.plan.hash,
        "trace": settings.trace and settings.trace.model,
        "network": settings.network and settings.network.name,
        "mesh": f"{mesh.mesh.tolist()}",
        "mesh_dim_names": mesh.mesh_dim_names,
        "device_type": mesh.device_type,
    }
    of_torch = {
        name: "a function" if callable(options[name]) else repr(options[name])
        for name in (*_OF_TORCH, "shard_codec")
        if name in options and name != "ignored_params"
    }
    return settings.options | memory.options | {name: repr(value) for name, value in given.items()} | of_torch


def _shard(module: torch.nn.Module, mesh: DeviceMesh, layers: Layers | None, options: Mapping[str, Any]) -> None:
    """Shard a module and the layers inside it that were asked for, the innermost first."""
    assert mesh.mesh_dim_names is not None
    inside = mesh[mesh.mesh_dim_names[1]]
    is_layer = _chosen(layers)
    for name, each in reversed(list(module.named_modules())):
        if (each is module or is_layer(name, each)) and not isinstance(each, FSDPModule):
            fully_shard(each, mesh=inside, **options)


def _chosen(layers: Layers | None) -> Callable[[str, torch.nn.Module], bool]:
    if layers is None:
        return lambda name, each: False
    if isinstance(layers, type):
        return lambda name, each: isinstance(each, layers)
    if isinstance(layers, Sequence):
        kinds = tuple(layers)
        if not kinds or not all(isinstance(each, type) for each in kinds):
            raise PlanError(f"layers is {layers!r}; wanted classes of modules, such as (TransformerBlock,)")
        return lambda name, each: isinstance(each, kinds)
    if callable(layers):
        return layers
    raise PlanError(f"layers is {layers!r}; wanted a class of modules, several, or a function of name and module")


def _obstacle(groups: Sequence[ShardGroup], asks: bool) -> str:
    """Return why there will be no plan, or an empty string."""
    if not asks:
        return UNPLANNED
    if len(found := {str(each.dtype) for each in groups}) > 1:
        return f"gradients are summed in several types ({', '.join(sorted(found))}), and a plan has one"
    return ""


def _device(mesh: DeviceMesh) -> torch.device:
    return torch.device("cpu") if mesh.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device())


def _attach(module: torch.nn.Module, held: _Held) -> None:
    """Give a module our methods beside torch's, as torch gives it its own: by a class made for it."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (ShardedModule, kind), {"_orig_cls_mro_index": 4})
    vars(module)[_HELD] = held
    module.register_forward_pre_hook(held.before_forward, prepend=True)
    module.register_forward_hook(held.after_forward)


def _held(module: object) -> _Held:
    found: _Held = vars(module)[_HELD]
    return found
