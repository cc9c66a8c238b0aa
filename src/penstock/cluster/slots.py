"""Which clusters exist on this machine, and which of them are still alive.

A live run holds an exclusive `flock` on its slot's file. The kernel drops the lock when the process ends, however it
ends, so a file that can be locked belongs to a dead run: no process number is trusted, none can be taken for another.
Processes that a launcher has forked hold the lock too; while one of them still works for a killed launcher, the slot
counts as alive and is not cleaned. To take or to clean a slot is to hold its lock first.
"""

import fcntl
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.cluster.layout import SLOTS, slot_of
from penstock.cluster.tools import Kernel
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
    except (OSError, ValueError, KeyError):
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
