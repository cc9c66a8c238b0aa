"""What an exchange between replicas still owes, as DTensors: saved and loaded by `torch.distributed.checkpoint`.

Each replica owes something of its own for each element of each parameter, and each rank keeps that of its shard. So a
parameter of shape (rows, columns) on R replicas has a state of shape (R, rows, columns): a DTensor on the whole mesh,
cut by replicas along its first dimension and as the parameter is along the others, by tensor parallelism too. The
checkpoint holds it whole, and any mesh can read it. Where there are fewer replicas than before, one takes over what
several owed, and owes the sum; where there are more, the others owe nothing. The sum over replicas, which is what
weights are still to be changed by, stays what it was for each element, up to float32 rounding where several are added.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, zeros
from torch.distributed.tensor.placement_types import Placement

from penstock.errors import FormatError, PlanError
from penstock.exchange.state import FORMAT as ONE_RANK
from penstock.exchange.state import OWED, State
from penstock.torch.checkpoint import TorchMemory
from penstock.torch.collective_errors import GroupRanks
from penstock.torch.fsdp.groups import ParameterShard, ShardGroup, mesh_of_all, placements_behind

FORMAT = "penstock-sharded-exchange/1"
KEY = "exchange"  # of the state in a checkpoint, unless the user says another
_WHERE = "sharded exchange state"
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # activation checkpointing's, torch.compile's


@dataclass(frozen=True, slots=True, eq=False)
class ShardedState:
    """The state of one sharded model's exchange, on its mesh."""

    memory: TorchMemory
    groups: tuple[ShardGroup, ...]
    mesh: DeviceMesh  # replicas by shards
    everyone: dist.ProcessGroup | None  # all ranks of the mesh

    def save(self) -> State:
        """Return what all ranks owe, by kind and parameter; every rank must call this, between iterations."""
        here = self.memory.state_dict(self._replica, self._replicas)
        kinds = [kind for kind, is_kept in zip(OWED, self._keeps, strict=True) if is_kept]
        memories = {
            kind: {_bare(each.name): self._whole(each, here["memories"][kind].get(each.name)) for each in self._shards}
            for kind in kinds
        }
        return {"format": FORMAT, "iterations": here["iterations"], "scale": here["scale"], **memories}

    def to_load(self, checkpoint: str | PathLike[str] | StorageReader, key: str = KEY) -> State:
        """Return zeros of the shapes that a checkpoint has under `key`, for `torch.distributed.checkpoint.load`."""
        reader = checkpoint if isinstance(checkpoint, StorageReader) else FileSystemReader(checkpoint)
        saved = reader.read_metadata().state_dict_metadata
        if f"{key}.format" not in saved:
            raise FormatError(_WHERE, key, "nothing of ours", f"what exchange_state_dict() returned, saved as {key!r}")
        state: State = {"format": "", "iterations": 0, "scale": 1.0}
        for kind in OWED:
            prefix = f"{key}.{kind}."
            found = {each.removeprefix(prefix): saved[each] for each in saved if each.startswith(prefix)}
            if found:
                state[kind] = {name: self._empty(name, value) for name, value in found.items()}
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over from a state of whatever mesh; every rank must call this, with what it loaded.

        What is wrong with it on any rank is raised on all, and nothing is changed then.
        """
        complaint, mine = "", State()
        try:
            mine = self._mine(state)
        except FormatError as error:
            complaint = str(error)
        held = GroupRanks(self.everyone).gather((complaint, mine.get("iterations"), mine.get("scale")), "loading")
        for rank, (theirs, _, _) in enumerate(held):
            if theirs:
                raise PlanError(theirs if all(each[0] == theirs for each in held) else f"on rank {rank}, {theirs}")
        if any(each[1:] != held[0][1:] for each in held):
            raise PlanError(f"ranks load states of different moments (iterations and scale: {held}); give all the same")
        nothing: dict[str, Any] = {kind: {} for kind in OWED}
        states = [{**mine, "rank": rank, "memories": nothing} for rank in range(self._replicas)]
        states[self._replica] = mine
        self.memory.load_state_dicts(states, self._replica, self._replicas)

    @property
    def _replica(self) -> int:
        return int(self.mesh.get_local_rank(0))

    @property
    def _replicas(self) -> int:
        return int(self.mesh.size(0))

    @property
    def _shards(self) -> list[ParameterShard]:
        return [each for group in self.groups for each in group.shards]

    @property
    def _keeps(self) -> tuple[bool, bool]:
        """Whether anything is owed, and whether velocities are kept: on all ranks alike."""
        compression = self.memory.compression
        return compression.codec is not None or self.memory.compresses, bool(compression.momentum.factor)

    def _whole(self, shard: ParameterShard, values: torch.Tensor | None) -> DTensor:
        """Return the state of all replicas, of which this rank has its own part."""
        here = torch.zeros(shard.shape) if values is None else values.view(shard.shape)
        shape = self._shape(shard, self._replicas)
        stride = torch.empty(shape, device="meta").stride()
        local = here.to(self.mesh.device_type)[None]
        mesh, placements = self._place(shard)
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    def _shard(self, name: str) -> ParameterShard:
        """Return this rank's part of a parameter; refuse a name that the model does not have."""
        known = {_bare(each.name): each for each in self._shards}
        if _bare(name) not in known:
            raise FormatError(_WHERE, name, "no such parameter", f"one of this model, such as {next(iter(known))!r}")
        return known[_bare(name)]

    def _empty(self, name: str, saved: Any) -> DTensor:
        """Return zeros for what a checkpoint has of one parameter."""
        shard = self._shard(name)
        if not isinstance(saved, TensorStorageMetadata):
            raise FormatError(_WHERE, name, type(saved).__name__, "a tensor")
        shape, wanted = tuple(saved.size), self._shape(shard, saved.size[0] if saved.size else 0)
        if shape != wanted:
            raise FormatError(
                _WHERE, name, shape, f"(replicas, {', '.join(map(str, wanted[1:]))}), as the parameter is"
            )
        mesh, placements = self._place(shard)
        return zeros(shape, dtype=torch.float32, device_mesh=mesh, placements=placements)

    def _mine(self, state: Mapping[str, Any]) -> State:
        """Return what this rank owes from now on, as one rank's state; refuse what does not fit the model."""
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            raise FormatError(_WHERE, "format", state.get("format") if isinstance(state, Mapping) else state, FORMAT)
        for name in ("iterations", "scale"):
            if not isinstance(state.get(name), int | float):
                raise FormatError(_WHERE, name, state.get(name), "a number")
        memories: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in OWED}
        for kind in OWED:
            owed = state.get(kind, {})
            if not isinstance(owed, Mapping):
                raise FormatError(_WHERE, kind, owed, "tensors by the names of parameters")
            for name, value in owed.items():
                shard = self._shard(name)
                memories[kind][shard.name] = self._taken(shard, value)
        return {
            "format": ONE_RANK, "rank": self._replica, "world_size": self._replicas, "memories": memories,
            "iterations": state.get("iterations"), "scale": state.get("scale"),
        }  # fmt: skip

    def _taken(self, shard: ParameterShard, value: Any) -> torch.Tensor:
        """Return the sum of what the replicas owed that this rank stands for."""
        name, wanted = shard.name, tuple(shard.parameter.shape)
        if not isinstance(value, DTensor) or value.shape[1:] != wanted or value.dtype != torch.float32:
            found = f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, torch.Tensor) else value
            raise FormatError(_WHERE, name, found, f"a DTensor of (replicas, *{wanted}), torch.float32")
        if (value.device_mesh, tuple(value.placements)) != self._place(shard):
            raise FormatError(_WHERE, name, f"{value.placements} on {value.device_mesh}", "what to_load made")
        return value.to_local().sum(0).cpu()

    def _shape(self, shard: ParameterShard, replicas: int) -> tuple[int, ...]:
        return (replicas, *shard.parameter.shape)

    def _place(self, shard: ParameterShard) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Return where the state of a parameter lies, and how it is cut."""
        return mesh_of_all(shard.parameter, self.mesh), placements_behind(shard.parameter)


def _bare(name: str) -> str:
    """Return a parameter's name without what its layer is wrapped in, as torch's checkpoints have it.

    >>> _bare("blocks.0._checkpoint_wrapped_module.up.weight")
    'blocks.0.up.weight'
    """
    for each in _WRAPPERS:
        name = name.replace(each, "")
    return name
