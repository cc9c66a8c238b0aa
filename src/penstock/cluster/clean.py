"""Removing an emulated cluster: its processes first, then its namespaces; the kernel takes the links with them.

Everything a run starts is in one of its namespaces, the multi-process service of its GPUs included.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.cluster.gpus import stop_service
from penstock.cluster.layout import namespace_path, slot_of
from penstock.cluster.slots import STATE_DIRECTORY, Slot, dead_slots
from penstock.cluster.tools import Kernel
from penstock.errors import ClusterError

KILL_WAIT_SECONDS = 30.0  # a process with a GPU's memory takes a while to end
SWITCH = "-switch"  # ends the name of the namespace that holds the switches, and the service of shared GPUs


@dataclass(frozen=True, slots=True)
class Removed:
    """What was left of one cluster."""

    slot: int
    namespaces: int
    processes: int


def clean_dead_runs(kernel: Kernel, directory: Path = STATE_DIRECTORY) -> list[Removed]:
    """Remove what launchers that were killed left behind; live runs are not touched."""
    removed = [remove_run(slot, kernel) for slot in dead_slots(kernel, directory)]
    return [run for run in removed if run.namespaces]  # without any, a live run has just removed itself


def remove_run(slot: Slot, kernel: Kernel) -> Removed:
    """Remove everything in a slot that the caller holds, then give up the slot."""
    namespaces = [name for name in kernel.namespaces() if slot_of(name) == slot.index]
    killed = kill_inside(name for name in namespaces if not name.endswith(SWITCH))  # ranks before what serves them
    stop_service(slot.files)
    killed += kill_inside(namespaces)
    for name in namespaces:
        try:
            kernel.remove(name)
        except OSError as error:
            path = namespace_path(name)
            raise ClusterError(
                f"namespace {name} cannot be removed: {error.strerror}; try `umount {path}; rm {path}`"
            ) from error
    slot.release()
    return Removed(slot.index, len(namespaces), killed)


def kill_inside(namespaces: Iterable[str]) -> int:
    """Kill every process in these namespaces and wait until all are gone; return how many there were."""
    names = list(namespaces)
    seen: set[int] = set()
    give_up = time.monotonic() + KILL_WAIT_SECONDS
    while inside := processes_inside(names):
        if time.monotonic() > give_up:
            raise ClusterError(f"processes {sorted(inside)} of an emulated cluster do not end; look at them with `ps`")
        for process in inside:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        seen |= inside
        time.sleep(0.01)
    return len(seen)


def processes_inside(namespaces: Iterable[str]) -> set[int]:
    """Return the processes whose network is one of `namespaces`, zombies left out (they have no network any more)."""
    wanted = {_identity(namespace_path(name)) for name in namespaces} - {None}
    if not wanted:
        return set()
    return {int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _identity(entry / "ns" / "net") in wanted}


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:  # the process or the namespace has just gone
        return None
    return status.st_dev, status.st_ino
