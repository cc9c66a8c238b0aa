"""The world of this process, as Horovod's interface has it: one per process, made by `init`, the same in all adaptors.

Adaptors export these names; `world()` is what they hand to a `Session`. Arguments that scripts written for Horovod hand
over stand beside those of a `Session`: `take_options` takes them out, with their meaning there or an answer in one
sentence. What changes no result is taken without effect, with a warning where the user may expect one.
"""

import atexit
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from penstock.adaptor.world import World, join
from penstock.errors import PenstockError, PlanError
from penstock.exchange import compression as exchange_compression

_joined: list[World] = []
Average, Sum, Min, Max, Product = "average", "sum", "min", "max", "product"


@dataclass(frozen=True)
class Compression(exchange_compression.Compression):
    """How gradients are compressed; `Compression.none` and `Compression.fp16` are Horovod's."""

    none: ClassVar[exchange_compression.Compression] = exchange_compression.Compression()
    fp16: ClassVar[exchange_compression.Compression] = exchange_compression.Compression("fp16")


_DEFAULTS: Mapping[str, Any] = {
    "op": Average,
    "gradient_predivide_factor": 1.0,
    "num_groups": 0,
    "groups": None,
    "device_dense": "",
    "device_sparse": "",
    "process_set": None,
    "use_locking": False,  # of TensorFlow 1
    "ignore_name_scope": False,  # names are not compared
    "prefix": None,  # likewise
    "priority": 0,  # ranks make calls in one order
}
ABSENT: Mapping[str, str] = {  # names of Horovod's modules, and what to do
    "Adasum": "use op=Average",
    "DistributedOptimizer": "use DistributedTrainer",  # of MXNet
    "BroadcastGlobalVariablesHook": "call broadcast_variables, or use BroadcastGlobalVariablesCallback",
    "ProcessSet": "every call is of all ranks",
    "SyncBatchNormalization": "use a larger batch, or average the statistics with allreduce",
    "add_process_set": "every call is of all ranks",
    "alltoall": "use allgather, and keep the part of this rank",
    "broadcast_global_variables": "call broadcast_variables with the variables",
    "broadcast_object_fn": "call broadcast_object",
    "cross_rank": "use rank() // local_size()",
    "cross_size": "use size() // local_size()",
    "elastic": "start the job again from its checkpoint",
    "global_process_set": "every call is of all ranks",
    "gloo_built": "init(engine='gloo') says whether it is there",
    "join": "give all ranks as many batches",
    "mpi_built": "init(engine='mpi') says whether it is there",
    "mpi_threads_supported": "leave it out; calls come from threads of their own where MPI takes them",
    "nccl_built": "leave it out; tensors travel through host memory",
    "reducescatter": "use allreduce, and keep the part of this rank",
    "remove_process_set": "every call is of all ranks",
    "start_timeline": "use measured_timeline() of the session",
    "stop_timeline": "use measured_timeline() of the session",
}


def init(engine: str | None = None) -> None:
    """Join the ranks that torchrun, mpirun or Slurm started; alone without them. A second call does nothing.

    engine: `mpi`, `gloo` (through torch, where it is installed), or None to choose.
    """
    if not _joined:
        _joined.append(join(engine))
        atexit.register(_leave)


def shutdown() -> None:
    """Leave the other ranks, all of them together; `init` may be called again under gloo."""
    if _joined:
        _joined.pop().close()


def _leave() -> None:
    with suppress(Exception):  # at the end of a process that may have failed: what went wrong was told
        shutdown()


def world() -> World:
    """Return the ranks that were joined."""
    if not _joined:
        raise PenstockError("penstock was not initialised; call init() first, on every rank")
    return _joined[0]


def is_initialized() -> bool:
    """Say whether `init` was called."""
    return bool(_joined)


def rank() -> int:
    """Return which rank this is."""
    return world().rank


def size() -> int:
    """Return how many ranks there are."""
    return world().size


def local_rank() -> int:
    """Return which rank of its host this is."""
    return world().place.local_rank


def local_size() -> int:
    """Return how many ranks this host has."""
    return world().place.local_size


def take_options(options: dict[str, Any], *, gradients: bool = True) -> str:
    """Take Horovod's arguments out of `options`; return the operation, `average` or `sum` where it is of gradients."""
    given = {name: options.pop(name) for name in _DEFAULTS if name in options}
    found = {**_DEFAULTS, **given}
    op, factor, groups = found["op"] or Average, found["gradient_predivide_factor"], found["groups"]
    if gradients and op not in (Average, Sum):
        raise PlanError(f"op={op!r} of gradients; wanted Average or Sum, or allreduce(gradient, op=...) for each")
    if not factor > 0 or (factor != 1.0 and op != Average):
        raise PlanError(
            f"gradient_predivide_factor={factor!r} with op={op!r}; wanted a number above 0, and op=Average: gradients "
            "are divided by the ranks before they are summed, whatever it is"
        )
    if groups is not None and not (isinstance(groups, list) or groups > 0):
        raise PlanError(f"groups={groups!r}; wanted a number above 0 or a list of lists of variables, or leave it out")
    if found["process_set"] is not None:
        raise PlanError(f"process_set={found['process_set']!r}; wanted none: gradients are averaged over all ranks")
    if groups is not None or found["num_groups"]:
        name = "groups" if groups is not None else "num_groups"
        _warn(f"{name}= has no effect: a plan says which gradients travel together; see planner= and explain()")
    for name in ("device_dense", "device_sparse"):
        if "gpu" in str(found[name]).lower():
            _warn(f"{name}={found[name]!r} has no effect: tensors travel through host memory")
    return str(op)


def chosen_op(average: bool | None, op: str | None) -> str:
    """Return the operation; `average` is Horovod's older way to say it."""
    if average is not None and op is not None:
        raise ValueError("average= and op=; wanted op alone")
    return op or (Sum if average is False else Average)


def nothing_else(options: dict[str, Any]) -> None:
    """Take what Horovod's collectives are given besides, and refuse the rest."""
    take_options(options, gradients=False)
    if options:
        raise TypeError(f"unexpected keyword argument {next(iter(options))!r}")


def broadcast_object(value: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return the root's value, whatever it is (pickled)."""
    given = value if rank() == root_rank else None
    return world().gather_objects(given, f"broadcast of an object from {root_rank}")[root_rank]


def allgather_object(value: Any, name: str | None = None) -> list[Any]:
    """Return every rank's value, whatever it is (pickled), by rank."""
    return world().gather_objects(value)


def absent(module: str, name: str) -> AttributeError:
    """Return what is raised for a name that a module does not have."""
    if name in ABSENT:
        return AttributeError(f"{module} has no {name}, which Horovod has; {ABSENT[name]}")
    return AttributeError(f"module {module!r} has no attribute {name!r}")


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)
