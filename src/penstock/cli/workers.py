"""Joining the other workers of a job that torchrun, mpirun or `penstock cluster run` started.

The environment says which: this is one of the few places that read it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.runtime.transport import Transport

ENGINES = ("gloo", "mpi")


def is_worker() -> bool:
    """Say whether a launcher started this process as one of several workers."""
    return "OMPI_COMM_WORLD_SIZE" in os.environ or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ)


@contextmanager
def joined_transport(engine: str = "") -> "Iterator[Transport]":
    """Join the job and yield its transport; without `engine`, mpi under mpirun and gloo otherwise."""
    if engine not in ("", *ENGINES):
        raise PenstockError(f"--engine: found {engine!r}; wanted one of {', '.join(ENGINES)}")
    if not is_worker():
        raise PenstockError(
            "started alone; wanted several workers: start it with `torchrun --nproc-per-node 4 -m penstock ...`, "
            "`mpirun -n 4 penstock ...` or `penstock cluster run --hosts 4 -- penstock ...`"
        )
    if engine == "mpi" or (not engine and "OMPI_COMM_WORLD_SIZE" in os.environ):
        from penstock.runtime.transport.mpi import MpiTransport

        yield MpiTransport()
        return
    import torch.distributed as dist

    from penstock.runtime.transport.c10d import C10dTransport

    dist.init_process_group("gloo")
    try:
        yield C10dTransport()
    finally:
        dist.destroy_process_group()
