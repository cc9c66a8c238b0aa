"""Which clusters exist on this machine, which of them are still alive, and the removal of those that are not.

A live run holds an exclusive `flock` on its slot's file. The kernel drops the lock when the process ends, however it
ends, so a file that can be locked belongs to a dead run: no process number is trusted, none can be taken for another.
Processes that a launcher has forked hold the lock too; while one of them still works for a killed launcher, the slot
counts as alive and is not cleaned. To take or to clean a slot is to hold its lock first.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.cluster.building import Kernel
from penstock.cluster.gpus import stop_service
from penstock.cluster.topology import SLOTS, namespace_path, slot_of
from penstock.errors import ClusterError

STATE_DIRECTORY = Path("/run/penstock")
ORPHAN_WAIT_SECONDS = 5.0  # how long what a dead launcher has forked may still hold the lock


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot that this process holds."""

    index: int
    path: Path
    lock: int  # descriptor of the locked file

    @property
    def files(self) -> Path:
        """Directory for what the run writes; it goes with the slot."""
        return self.path.with_name(f"files-{self.index}")

    def note(self, **facts: object) -> None:
        """Write who holds the slot; only for people and for `clean`'s messages."""
        os.ftruncate(self.lock, 0)
        os.pwrite(self.lock, json.dumps({"pid": os.getpid(), **facts}).encode() + b"\n", 0)

    def release(self) -> None:
        """Forget the slot; call it once nothing of the run is left."""
        shutil.rmtree(self.files, ignore_errors=True)
        self.path.unlink(missing_ok=True)
        os.close(self.lock)


def claim(directory: Path = STATE_DIRECTORY) -> Slot:
    """Take the lowest free slot."""
    for index in range(SLOTS):
        slot = try_lock(index, directory)
        if slot is not None:
            return slot
    raise ClusterError(f"all {SLOTS} emulated clusters of this machine are in use; stop some of them")


def try_lock(index: int, directory: Path) -> Slot | None:
    """Lock slot `index`, or return None where a live run holds it."""
    path = directory / f"cluster-{index}"
    while True:
        descriptor = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if _still_at(path, descriptor):
            return Slot(index, path, descriptor)
        os.close(descriptor)  # its last holder removed the file between our open and our lock


def dead_slots(kernel: Kernel, directory: Path = STATE_DIRECTORY) -> list[Slot]:
    """Lock and return every slot that has a file or a namespace but no live run."""
    indices = {int(path.name.removeprefix("cluster-")) for path in directory.glob("cluster-*")}
    indices |= {slot for name in kernel.namespaces() if (slot := slot_of(name)) is not None}
    locked = (_lock_dead(index, directory) for index in sorted(indices))
    return [slot for slot in locked if slot is not None]


def _lock_dead(index: int, directory: Path) -> Slot | None:
    give_up = time.monotonic() + ORPHAN_WAIT_SECONDS
    while (slot := try_lock(index, directory)) is None:
        if _holder_lives(directory / f"cluster-{index}") or time.monotonic() > give_up:
            return None
        time.sleep(0.02)
    return slot


def _holder_lives(path: Path) -> bool:
    """Tell whether the process that noted itself in `path` runs; a file without a note is being written: alive."""
    try:
        return Path(f"/proc/{json.loads(path.read_text())['pid']}").exists()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ClusterError(f"{path}: {error.strerror}; live runs are noted there, so it must be writable") from error


def _still_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


# Removal: processes first, then namespaces; the kernel removes the links with them. Everything a run starts is in one
# of its namespaces, the multi-process service of its GPUs included.


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
