"""The engines that carry messages: gloo and NCCL of torch, and MPI."""

from collections.abc import Callable

from penstock.cluster.mpi import find_mpirun
from penstock.cluster.tools import run_command
from penstock.doctor.finding import Finding, broken, missing, works
from penstock.doctor.probe import Probe, probe
from penstock.errors import ClusterError

_TORCH = """
import torch, torch.distributed as dist
print(int(dist.is_available() and dist.is_gloo_available()), int(dist.is_available() and dist.is_nccl_available()))
print(torch.cuda.device_count())
print(".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() and torch.cuda.device_count() else "")
"""
_MPI = "from mpi4py import MPI; print(MPI.Get_library_version().split(',')[0].strip())"
_TORCH_REMEDY = "pip install 'penstock[torch]'"


def check_engines(look: Probe = probe, mpirun: Callable[[], str] | None = None) -> list[Finding]:
    """Return a finding per engine."""
    return [*check_torch_engines(look), check_mpi(look, mpirun or (lambda: find_mpirun(run_command)))]


def check_torch_engines(look: Probe) -> list[Finding]:
    """Say whether torch has gloo, and NCCL with a GPU to use it on."""
    ran, said = look(_TORCH)
    if not ran:
        state = missing if "No module named 'torch'" in said else broken
        return [state("gloo", said, _TORCH_REMEDY), state("NCCL", said, _TORCH_REMEDY)]
    flags, gpus, version = [*said.splitlines(), "", ""][:3]
    gloo, nccl = (flag == "1" for flag in flags.split())
    return [
        works("gloo", "in torch") if gloo else broken("gloo", "torch was built without it", _TORCH_REMEDY),
        _nccl(nccl, int(gpus), version),
    ]


def _nccl(there: bool, gpus: int, version: str) -> Finding:
    if not there:
        return missing("NCCL", "torch was built without it", "only for training on GPUs: install a CUDA build of torch")
    if not gpus:
        return missing("NCCL", "in torch, but there is no GPU", "only for training on GPUs")
    return works("NCCL", f"{version}, {gpus} GPU(s)")


def check_mpi(look: Probe, mpirun: Callable[[], str]) -> Finding:
    """Say whether mpi4py loads and finds an MPI, and whether there is an `mpirun` that starts programs."""
    ran, said = look(_MPI)
    if not ran:
        state = missing if "No module named 'mpi4py'" in said else broken
        return state("MPI", said, "pip install 'penstock[mpi]'")
    try:
        return works("MPI", f"{said}, {mpirun()}")
    except ClusterError as error:
        return broken("MPI", f"{said}; {error}", "pip install 'penstock[mpi]'")
