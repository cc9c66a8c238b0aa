"""The world of this process, as Horovod's interface has it: one per process, made by `init`, the same in all adaptors.

Adaptors export these names; `world()` is what they hand to a `Session`.
"""

import atexit
from contextlib import suppress

from penstock.adaptor.world import World, join
from penstock.errors import PenstockError

_joined: list[World] = []


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
