"""Which rank of which job this process is, by the variables of torchrun, mpirun or Slurm.

All launchers are read as torchrun's, which torch.distributed knows: `torchrun_variables` gives the same from other
names. `place_of` says the rest: rank, ranks, and the same on this host.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import PenstockError

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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands in its job."""

    rank: int
    world_size: int
    local_rank: int = 0  # among the ranks of this host
    local_size: int = 1  # ranks of this host

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks are on this host."""
        return self.local_size == self.world_size


def place_of(environment: Mapping[str, str]) -> Place:
    """Return this process's place; alone where no launcher started it.

    >>> place_of({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    ...           "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    Place(rank=1, world_size=2, local_rank=1, local_size=2)
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(environment):
        found = [environment.get(name) for name in names]
    elif is_mpirun(environment):
        found = [environment.get(MPI[name]) for name in names]
    elif int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        named = _from_slurm(environment)
        found = [named[name] for name in names]
    else:
        return Place(0, 1)
    rank, size, local_rank, local_size = (None if text is None else int(text) for text in found)
    assert rank is not None
    assert size is not None  # a launcher that names one names both
    return Place(rank, size, local_rank or 0, local_size or 1)


def is_mpirun(environment: Mapping[str, str]) -> bool:
    """Say whether Open MPI's mpirun started this process."""
    return "OMPI_COMM_WORLD_SIZE" in environment
