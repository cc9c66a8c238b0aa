"""One GPU for the ranks of all emulated hosts: CUDA's multi-process service, and what NCCL has to be told.

NCCL refuses two ranks with the same host and the same GPU. Every rank is therefore a host of its own to NCCL
(`NCCL_HOSTID`), and all meet over sockets; messages between ranks of one emulated host stay on its loopback.

Without the multi-process service the processes on a GPU take turns, and every message waits for a turn: on an H200, an
all-reduce of 4 KB between two ranks took 4.6 ms, and 0.12 with it.
"""

import contextlib
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from penstock.cluster.processes import prepare_child
from penstock.cluster.topology import namespace_path

SHARED = "shared"
GPUS = ("none", SHARED)
CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS, START = "mps", "mps-logs", "mps-start"  # in the directory of a run
START_SECONDS, STOP_SECONDS = 30.0, 10.0


@dataclass(frozen=True, slots=True)
class SharedGpu:
    """How the ranks of all hosts share a GPU."""

    files: Path | None  # directory with the pipes of the multi-process service; None: it does not run
    complaint: str = ""  # why it does not run, and what that costs; empty where it runs

    def environment(self, slot: int, rank: int | str) -> dict[str, str]:
        """Return a rank's variables: where the service is, and a host of its own for NCCL.

        `LOCAL_RANK` is 0, because programs take it for the number of their GPU and there is one.
        """
        settings = {"LOCAL_RANK": "0", "NCCL_HOSTID": f"penstock-{slot}-rank{rank}"}
        return settings if self.files is None else settings | service_environment(self.files)


def service_environment(files: Path) -> dict[str, str]:
    """Return the variables by which the service and its clients find one another."""
    return {
        "CUDA_MPS_PIPE_DIRECTORY": str(files / PIPES),
        "CUDA_MPS_LOG_DIRECTORY": str(files / LOGS),
    }


def start_service(files: Path, namespace: str, which: Callable[[str], str | None] = shutil.which) -> SharedGpu:
    """Start the multi-process service in a namespace, so that cleaning finds it there; where it may not run, say why.

    It serves all GPUs, numbered as without it: clients choose among them by `CUDA_VISIBLE_DEVICES` of their own.
    """
    if which(CONTROL) is None:
        return _without(f"`{CONTROL}` is not on PATH")
    for folder in (PIPES, LOGS):
        (files / folder).mkdir(exist_ok=True)
    settings = [f"{name}={value}" for name, value in service_environment(files).items()]
    enter = ["nsenter", f"--net={namespace_path(namespace)}", "env", "-u", "CUDA_VISIBLE_DEVICES"]
    with open(files / START, "w+") as said:  # a file, not a pipe: what stays in the background may keep it open
        try:
            done = subprocess.run(
                [*enter, *settings, CONTROL, "-d"],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=prepare_child(),
                timeout=START_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return _without(f"`{CONTROL} -d` did not end within {START_SECONDS:g} s")
        if done.returncode == 0:
            return SharedGpu(files)
        said.seek(0)
        lines = said.read().strip().splitlines()
    return _without(f"`{CONTROL} -d` says: {lines[-1] if lines else f'exit code {done.returncode}'}")


def restart_service(files: Path, namespace: str) -> None:
    """Start the service anew after a rank was killed: it takes no clients for a while then, or none any more."""
    stop_service(files)
    until = monotonic() + STOP_SECONDS
    while start_service(files, namespace).files is None and monotonic() < until:
        sleep(0.2)  # the old one is still about to end


def _without(reason: str) -> SharedGpu:
    cost = "ranks take turns on the GPU, and messages wait for turns"
    return SharedGpu(None, f"CUDA's multi-process service does not run: {reason}; {cost}")


def stop_service(files: Path) -> None:
    """Ask the service of a run to end, if it has one; what does not listen is killed with its namespace."""
    if not (files / PIPES).exists():
        return
    settings = [f"{name}={value}" for name, value in service_environment(files).items()]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            ["env", *settings, CONTROL],
            input=b"quit\n",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            timeout=STOP_SECONDS,
            check=False,
        )
