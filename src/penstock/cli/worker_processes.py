"""Joining the other workers of a job that torchrun, mpirun or `penstock cluster run` started.

The environment says which: this is one of the few places that read it.
"""

import os
import re
from collections.abc import Iterator, Mapping
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


# Joining a job that Slurm or mpirun started, as torchrun's workers do: the same variables from other names.


PORT = 20000  # and up: a job's own, so that two jobs on one machine do not meet
MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
SLURM = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
    "LOCAL_WORLD_SIZE": "SLURM_STEP_TASKS_PER_NODE",
}


def torchrun_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun would have set in addition; nothing where it has, or where there is one worker only.

    `srun` says where its first host is; mpirun does not, so unless all ranks are on one host MASTER_ADDR must be given.
    """
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(environment):
        return {}
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return _from_mpi(environment)
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _from_slurm(environment)
    return {}


def _from_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    found = {name: environment[theirs] for name, theirs in MPI.items()}
    if "MASTER_ADDR" not in environment and found["WORLD_SIZE"] != found["LOCAL_WORLD_SIZE"]:
        raise PenstockError("mpirun started ranks on several hosts; say where rank 0 is: `mpirun -x MASTER_ADDR=HOST`")
    job = re.sub(r"\D", "", environment.get("PMIX_NAMESPACE", ""))[-6:] or "0"
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT + int(job) % 10000)} | found | _kept(environment)


def _from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    found = {name: environment.get(theirs, "0") for name, theirs in SLURM.items()}
    found["LOCAL_WORLD_SIZE"] = found["LOCAL_WORLD_SIZE"].split("(")[0].split(",")[0]
    host = first_host(environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "localhost")))
    port = PORT + int(environment.get("SLURM_JOB_ID", "0")) % 10000
    return {"MASTER_ADDR": host, "MASTER_PORT": str(port)} | found | _kept(environment)


def _kept(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environment}


def first_host(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it.

    >>> first_host("gpu[007-010,15],login1")
    'gpu007'
    """
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    assert match is not None, nodes
    return match[1] + (match[2] or "") + (match[3] or "")
