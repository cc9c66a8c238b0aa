"""The checks of `penstock doctor`: packages, machine, engines, emulated hosts, caches; `examine` runs all of them."""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from penstock.cluster.building import require_tools, run_command
from penstock.cluster.emulate import emulated_cluster
from penstock.cluster.gpus import SHARED, SharedGpu
from penstock.cluster.processes import Collected
from penstock.cluster.worker_commands import find_mpirun
from penstock.compll.cache import default_cache
from penstock.doctor import Finding, State, broken, missing, works
from penstock.doctor.smoke import check_smoke
from penstock.errors import ClusterError, PenstockError

PROBE_SECONDS = 120.0
Probe = Callable[[str], tuple[bool, str]]  # code -> did it run, and what it printed or complained


def probe(code: str) -> tuple[bool, str]:
    """Run Python code; return whether it succeeded, and what it printed or its last complaint."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {PROBE_SECONDS:g} s"
    if done.returncode == 0:
        return True, done.stdout.strip()
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return False, said[-1].strip() if said else f"ended with exit code {done.returncode} and said nothing"


LEAST_PYTHON = (3, 11)
VersionOf = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Package:
    """A package, the oldest version that will do, and who needs it."""

    name: str
    least: str
    needed_for: str
    extra: str | None = None  # of ours that installs it; None: penstock itself requires it


PACKAGES = (
    Package("numpy", "1.26", "everything"),
    Package("numba", "0.60", "compressors on the CPU"),
    Package("lark", "1.2", "compressors of your own"),
    Package("matplotlib", "3.8", "pictures"),
    Package("pyroute2", "0.9.7", "emulated hosts"),
    Package("rich", "13.7", "tables"),
    Package("torch", "2.11", "training, gloo and NCCL", "torch"),
    Package("mpi4py", "4.0", "the MPI engine", "mpi"),
    Package("openmpi", "5.0", "the MPI engine's mpirun", "mpi"),
    Package("triton", "3.6", "compressors on the GPU", "gpu"),
)


def installed_version(name: str) -> str | None:
    """Return the version of an installed package, None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_packages(version_of: VersionOf = installed_version) -> list[Finding]:
    """Return a finding for Python, for penstock and for every package it may use."""
    return [
        check_python(sys.version_info[:2]),
        works("penstock", version_of("penstock") or "from a source tree"),
        *(check_package(package, version_of(package.name)) for package in PACKAGES),
    ]


def check_python(version: tuple[int, ...]) -> Finding:
    """Say whether this Python is new enough."""
    wanted = ".".join(map(str, LEAST_PYTHON))
    if version < LEAST_PYTHON:
        return broken("Python", ".".join(map(str, version)), f"wanted {wanted} or newer: make the environment with it")
    return works("Python", f"{platform.python_version()} at {sys.executable}")


def check_package(package: Package, version: str | None) -> Finding:
    """Say whether a package is there and new enough."""
    install = f"pip install 'penstock[{package.extra}]'" if package.extra else "pip install --upgrade penstock"
    if version is None:
        found = f"not installed; needed for {package.needed_for}"
        return (missing if package.extra else broken)(package.name, found, install)
    if _numbers(version) < _numbers(package.least):
        found = f"{version}; {package.needed_for} wants {package.least} or newer"
        return broken(package.name, found, f"pip install --upgrade '{package.name}>={package.least}'")
    return works(package.name, version)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version.

    >>> _numbers("2.13.0+cpu")
    (2, 13, 0)
    """
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else (0,)


LEAST_CACHE_NBYTES = 100 * 2**20
_GPUS = """
import torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print("; ".join(names))
"""


def check_machine() -> list[Finding]:
    """Return findings about cores, memory and GPUs."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [check_cores(cores, os.cpu_count() or cores), works("memory", f"{memory:.1f} GiB"), check_gpus()]


def check_cores(usable: int, present: int) -> Finding:
    """Say how many cores this process may use; with one, workers and their communication take turns."""
    found = f"{usable} of {present} usable by this process"
    if usable == 1:
        return missing("cores", found, "several workers on one core only take turns: use more cores to measure speed")
    return works("cores", found)


def check_gpus(look: Probe = probe) -> Finding:
    """Say which GPUs torch sees."""
    ran, said = look(_GPUS)
    if not ran:
        return missing("GPUs", f"torch cannot say: {said}", "mend torch first")
    if not said:
        return missing("GPUs", "torch sees none", "training runs on the CPU; GPUs want a driver and a CUDA torch")
    return works("GPUs", said)


def check_caches() -> list[Finding]:
    """Return findings about the folder of compiled compressors."""
    return [check_cache(default_cache())]


def check_cache(folder: Path | None) -> Finding:
    """Say whether there is a cache folder that only the user may write, and whether it has room."""
    if folder is None:
        remedy = (
            "chmod go-w ~ ~/.cache ~/.cache/penstock, and remove ~/.cache/penstock/compll where others could write to "
            "it, or every start compiles anew"
        )
        return missing("cache", "no folder that is this user's alone", remedy)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        return missing("cache", f"{folder}: {error.strerror}", f"make {folder} writable, or every start compiles anew")
    if free < LEAST_CACHE_NBYTES:
        return missing("cache", f"{folder}: {free / 2**20:.0f} MiB free", "free some room on that disk")
    return works("cache", f"{folder}, {free / 2**30:.0f} GiB free")


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


HOSTS, GPU_HOSTS = "emulated hosts", "GPU hosts"
NEEDED = ("NCCL", HOSTS)  # the findings without which GPU hosts do not work
WITHOUT = "without it, workers of this machine talk over loopback: no rates, no hosts"
WITHOUT_GPU = "only for NCCL between ranks on one GPU: `penstock cluster run --gpus shared`"
TRY_SECONDS = 30.0


def check_hosts() -> list[Finding]:
    """Build two hosts at 1 Gb/s, run a command on each and take them down again."""
    try:
        require_tools(sys.platform, os.geteuid())
        try_hosts("none")
    except PenstockError as error:
        return [missing(HOSTS, str(error), WITHOUT)]
    return [works(HOSTS, "root, namespaces and token buckets over netlink: two hosts at 1 Gb/s were built")]


def check_gpu_hosts(findings: Sequence[Finding]) -> list[Finding]:
    """Say whether ranks on emulated hosts can share a GPU, from what was found before and by starting the service."""
    found = {finding.name: finding for finding in findings}
    for name in NEEDED:
        if name not in found or found[name].state is not State.WORKS:
            reason = found[name].found if name in found else "could not be looked at"
            return [missing(GPU_HOSTS, f"{name}: {reason}", WITHOUT_GPU)]
    service = try_hosts(SHARED)
    here = f"NCCL {found['NCCL'].found}"
    if service is not None and service.complaint:
        return [missing(GPU_HOSTS, f"{here}; {service.complaint}", "they work, slowly: the driver brings the service")]
    return [works(GPU_HOSTS, f"{here}; CUDA's multi-process service was started beside two hosts")]


def try_hosts(gpus: str) -> SharedGpu | None:
    """Run a command on two hosts; return how they share a GPU."""
    with emulated_cluster(2, "1gbit", gpus=gpus) as cluster:
        outcome = cluster.run(["true"], sink=Collected(), timeout_seconds=TRY_SECONDS)
    if outcome.exit_code != 0:
        raise ClusterError(f"a command on host {outcome.failed_rank} ended with exit code {outcome.exit_code}")
    return cluster.gpu


Done = Callable[[str], None]  # told what was just checked, for progress
CHECKS: dict[str, Callable[[], list[Finding]]] = {
    "packages": check_packages,
    "machine": check_machine,
    "engines": check_engines,
    "hosts": check_hosts,
    "caches": check_caches,
}


def examine(smoke_test: bool = True, done: Done = lambda name: None) -> list[Finding]:
    """Return every finding; the smoke test runs over the engines that were found to work."""
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        findings += guarded(name, check)
        done(name)
    findings += guarded("GPU hosts", lambda: check_gpu_hosts(findings))
    if smoke_test:
        findings += guarded("smoke test", lambda: check_smoke(usable_engines(findings)))
        done("smoke test")
    return findings


def guarded(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """Run one check; a check that fails itself is a finding too, and the others still run."""
    try:
        return check()
    except Exception as error:
        return [broken(name, f"{type(error).__name__}: {error}", "this is a mistake in penstock; please report it")]


def usable_engines(findings: Sequence[Finding]) -> list[str]:
    """Return the engines to try, of those that are there; NCCL needs a GPU per worker and is left to torch."""
    there = {finding.name for finding in findings if finding.state is State.WORKS}
    return [engine for name, engine in (("gloo", "gloo"), ("MPI", "mpi")) if name in there]
