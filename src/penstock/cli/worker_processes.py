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
DELAY = "PENSTOCK_MESSAGE_DELAY_SECONDS"  # `penstock cluster run --latency` sets it


def is_worker() -> bool:
    """Say whether a launcher started this process as one of several workers."""
    return "OMPI_COMM_WORLD_SIZE" in os.environ or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ)


@contextmanager
def joined_transport(engine: str = "") -> "Iterator[Transport]":
    """Join the job and yield its transport; without `engine`, mpi under mpirun and gloo otherwise."""
    with _joined(engine) as transport:
        delay_seconds = _delay_seconds()
        if delay_seconds == 0:
            yield transport
            return
        from penstock.runtime.transport.delayed import delayed

        with delayed(transport, delay_seconds) as further:
            yield further


def _delay_seconds() -> float:
    """Return the delay that was asked for each message, 0 where none was."""
    text = os.environ.get(DELAY, "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 60:
        raise PenstockError(f"{DELAY}: found {text!r}; wanted seconds from 0 to 60")
    return seconds


@contextmanager
def _joined(engine: str) -> "Iterator[Transport]":
    if engine not in ("", *ENGINES):
        raise PenstockError(f"--engine: found {engine!r}; wanted one of {', '.join(ENGINES)}")
    if not is_worker():
        raise PenstockError(
            "started alone; wanted several workers: start it with `torchrun --nproc-per-node 4 -m penstock ...`, "
            "`mpirun -n 4 penstock ...` or `penstock cluster run --hosts 4 -- penstock ...`"
        )
    if engine == "mpi" or (not engine and "OMPI_COMM_WORLD_SIZE" in os.environ):
        engine = "mpi"
    from penstock.runtime.connect import connected

    with connected(engine or "gloo") as transport:
        yield transport
