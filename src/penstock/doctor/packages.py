"""Which packages are there, and whether they are new enough."""

import platform
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from penstock.doctor.finding import Finding, broken, missing, works

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
