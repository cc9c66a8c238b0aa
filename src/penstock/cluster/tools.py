"""Running `ip` and `tc`, and saying in one line what this machine lacks."""

import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.cluster.links import Step
from penstock.errors import ClusterError

PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux"}
FORBIDDEN_REMEDY = "needs CAP_SYS_ADMIN and CAP_NET_ADMIN; in a container, start it with --privileged"
COMMAND_TIMEOUT_SECONDS = 30.0


class Runner(Protocol):
    """Runs one short command to its end."""

    def __call__(self, argv: Sequence[str], stdin: str = "", keep_open: Sequence[int] = ()) -> tuple[int, str, str]:
        """Return exit code, standard output and standard error; `keep_open` are descriptors the command inherits."""
        ...


def run_command(argv: Sequence[str], stdin: str = "", keep_open: Sequence[int] = ()) -> tuple[int, str, str]:
    """Run a command in a session of its own, so that Ctrl-C does not stop it half-way."""
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            text=True,
            pass_fds=keep_open,
            start_new_session=True,
            timeout=COMMAND_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"`{shlex.join(argv)}` did not end within {COMMAND_TIMEOUT_SECONDS:g} s; try it") from None
    return done.returncode, done.stdout, done.stderr


def require_tools(platform: str, effective_user: int, which: Callable[[str], str | None] = shutil.which) -> None:
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


def perform(step: Step, runner: Runner, keep_open: Sequence[int] = ()) -> None:
    """Run one step, or raise with what the tool said and what the kernel or container lacks."""
    code, _, complaint = runner(step.argv, step.stdin, keep_open)
    if code != 0 and step.required:
        said = next((line for line in complaint.splitlines() if line.strip()), f"exit code {code}")
        remedy = FORBIDDEN_REMEDY if "not permitted" in said else step.remedy
        raise ClusterError(f"{step.purpose} failed: {said.strip()}; {remedy}")
