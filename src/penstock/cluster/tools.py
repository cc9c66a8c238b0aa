"""What emulated hosts ask of this machine, and one line for what it lacks."""

import errno
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Protocol

from penstock.cluster.links import Step
from penstock.errors import ClusterError

PACKAGES = {"nsenter": "util-linux", "unshare": "util-linux", "mount": "mount"}
FORBIDDEN_REMEDY = "needs CAP_SYS_ADMIN and CAP_NET_ADMIN; in a container, start it with --privileged"
COMMAND_TIMEOUT_SECONDS = 30.0

Runner = Callable[[Sequence[str]], tuple[int, str, str]]  # runs a short command: exit code, its output, its errors


class Kernel(Protocol):
    """Makes and removes what emulated hosts consist of."""

    def build(self, steps: Iterable[Step]) -> None:
        """Carry out `steps` in order; raise `ClusterError` where a required one fails."""
        ...

    def namespaces(self) -> list[str]:
        """Return the names of all network namespaces that have one."""
        ...

    def remove(self, namespace: str) -> None:
        """Remove a namespace, and with it the ends of cables in it; raise `OSError` where that fails."""
        ...


def this_kernel() -> Kernel:
    """Return this machine's kernel."""
    from penstock.cluster.netlink import Netlink  # pyroute2 takes 0.2 s to load, and most of penstock does without

    return Netlink()


def run_command(argv: Sequence[str]) -> tuple[int, str, str]:
    """Run a command in a session of its own, so that Ctrl-C does not stop it half-way."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            start_new_session=True,
            timeout=COMMAND_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"`{shlex.join(argv)}` did not end within {COMMAND_TIMEOUT_SECONDS:g} s; try it") from None
    return done.returncode, done.stdout, done.stderr


def require_tools(
    platform: str,
    effective_user: int,
    which: Callable[[str], str | None] = shutil.which,
    find_package: Callable[[str], object | None] = find_spec,
) -> None:
    """Raise `ClusterError` unless this is Linux, we are root and the tools are there."""
    if platform != "linux":
        raise ClusterError(f"emulated hosts are Linux network namespaces and this is {platform}; run on Linux as root")
    if effective_user != 0:
        raise ClusterError("emulated hosts need root to make network namespaces; run the same command with `sudo -E`")
    for tool, package in PACKAGES.items():
        if which(tool) is None:
            raise ClusterError(
                f"emulated hosts need `{tool}`, which is not on PATH; `apt install {package}` or the like"
            )
    if find_package("pyroute2") is None:
        raise ClusterError("emulated hosts need the package pyroute2, which is not installed; `pip install pyroute2`")


def carry_out(steps: Iterable[Step], act: Callable[[Step], None]) -> None:
    """Do every step, or raise with what the kernel said of the one that failed and what kernel or container lack.

    `act` raises `OSError` where a step fails; steps that are not required may.
    """
    for step in steps:
        try:
            act(step)
        except OSError as error:
            if step.required:
                remedy = FORBIDDEN_REMEDY if error.errno in (errno.EPERM, errno.EACCES) else step.remedy
                raise ClusterError(f"{step.purpose} failed: {_words(error)}; {remedy}") from error


def _words(error: OSError) -> str:
    """Return what the kernel said, and its error number in words where that says something else."""
    number = os.strerror(error.errno or 0)
    return number if error.strerror in (None, number) else f"{error.strerror}: {number}"
