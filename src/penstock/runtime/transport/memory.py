"""Ranks as threads of one process, for tests: messages are copies between arrays.

The strictest engine there is: no send ends before its receive is posted, so a program that needs buffering hangs
here and nowhere else. A rank can be declared dead, as a broken connection would do it.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import dataclass
from time import monotonic

import numpy as np

from penstock.program import Collective, split
from penstock.runtime.reduce import bits, merge_kernel
from penstock.runtime.transport import LANE_TAGS, Array, Bytes, ring_nbytes


class Fabric:
    """What the ranks of one memory world share: a lock, and the messages that wait for their other half."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.lock = threading.RLock()
        self.changed = [threading.Condition(self.lock) for _ in range(world_size)]  # what a rank waits for
        self.waiting: dict[tuple[str, int, int, int], deque[_Work]] = defaultdict(deque)  # (kind, source, target, tag)
        self.dead: set[int] = set()
        self.notes: dict[int, str] = {}  # rank: the line it left
        self.calls: dict[int, dict[int, Array]] = defaultdict(dict)  # native call -> rank -> its values

    def transport(self, rank: int) -> "MemoryTransport":
        """Return the engine as `rank` sees it."""
        return MemoryTransport(self, rank)

    def kill(self, rank: int) -> None:
        """Let every present and future message with `rank` fail."""
        with self.lock:
            self.dead.add(rank)
            self.wake()

    def wake(self) -> None:
        """Let every rank look again; the lock must be held."""
        for changed in self.changed:
            changed.notify_all()

    def post(self, kind: str, other: str, source: int, target: int, tag: int, work: "_Work") -> None:
        """Pair a send with the oldest receive that waits for it, or the other way round, or let it wait."""
        with self.lock:
            partners = self.waiting[other, source, target, tag]
            if not partners:
                self.waiting[kind, source, target, tag].append(work)
                return
            partner = partners.popleft()
            reader, writer = (work, partner) if kind == "send" else (partner, work)
            _copy(reader.view, writer.view, source, target)
            work.done = partner.done = True
            self.changed[partner.rank].notify_all()  # nothing else became ready: many ranks would wake for nothing

    def wait(self, rank: int, ready: Callable[[], bool], peers: set[int], seconds: float) -> None:
        """Block `rank` until `ready`, a peer's death, or the timeout; the lock must be held."""
        deadline = monotonic() + seconds
        while not ready():
            if gone := peers & self.dead:
                raise ConnectionError(f"rank {min(gone)} is gone")
            if not self.changed[rank].wait(deadline - monotonic()) and not ready():
                raise TimeoutError(f"nothing for {seconds:g} s")


def _copy(read: Bytes, write: Bytes, source: int, target: int) -> None:
    assert read.size <= write.size, f"rank {source} sends {read.size} bytes, rank {target} expects {write.size}"
    np.copyto(write[: read.size], read)


@dataclass(slots=True)
class _Work:
    fabric: Fabric
    view: Bytes
    rank: int  # whose it is
    peer: int
    done: bool = False

    def wait(self, seconds: float) -> None:
        with self.fabric.lock:
            self.fabric.wait(self.rank, lambda: self.done, {self.peer}, seconds)


class MemoryTransport:
    """One rank of a `Fabric`."""

    takes_shorter = True

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self._fabric, self._rank = fabric, rank
        self._natives = 0
        self._first_tag = 0  # of this lane
        self.sent_nbytes = 0

    @property
    def rank(self) -> int:
        """Which rank this is."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._fabric.world_size

    def lane(self, number: int) -> "MemoryTransport":
        """Return the same rank for another thread."""
        found = copy(self)
        found.sent_nbytes, found._first_tag = 0, number * LANE_TAGS
        return found

    def isend(self, view: Bytes, peer: int, tag: int) -> _Work:
        """Start sending."""
        self.sent_nbytes += view.nbytes
        work = _Work(self._fabric, view, self._rank, peer)
        self._fabric.post("send", "recv", self._rank, peer, self._first_tag + tag, work)
        return work

    def irecv(self, view: Bytes, peer: int, tag: int) -> _Work:
        """Start receiving."""
        work = _Work(self._fabric, view, self._rank, peer)
        self._fabric.post("recv", "send", peer, self._rank, self._first_tag + tag, work)
        return work

    def leave_note(self, text: str) -> None:
        """Leave a line for the other ranks."""
        with self._fabric.lock:
            self._fabric.notes[self._rank] = text
            self._fabric.wake()

    def read_note(self, peer: int, seconds: float) -> str | None:
        """Return the line that `peer` left."""
        with self._fabric.lock:
            self._fabric.changed[self._rank].wait_for(lambda: peer in self._fabric.notes, seconds)
            return self._fabric.notes.get(peer)

    def finish_reading(self, peers: Collection[int], seconds: float) -> None:
        """Do nothing: the process of all ranks keeps their notes."""

    def hang_up(self) -> None:
        """Let every message with this rank fail."""
        self._fabric.kill(self._rank)

    def native(self, collective: Collective, values: Array, dtype: str, root: int, seconds: float) -> None:
        """Give all ranks a copy of all values, then let each make its own result of them."""
        self.sent_nbytes += ring_nbytes(values.nbytes, self.world_size)
        fabric, others = self._fabric, set(range(self.world_size)) - {self._rank}
        self._natives += 1
        with fabric.lock:
            gathered = fabric.calls[self._natives]
            gathered[self._rank] = values.copy()
            fabric.wake()
            fabric.wait(self._rank, lambda: len(gathered) == fabric.world_size, others, seconds)
            fabric.calls.pop(self._natives - 1, None)  # a rank in this call has left the one before
        _finish_native(collective, values, [gathered[rank] for rank in range(self.world_size)], dtype, self._rank, root)


def _finish_native(
    collective: Collective, values: Array, gathered: list[Array], dtype: str, rank: int, root: int
) -> None:
    if collective is Collective.BROADCAST:
        np.copyto(values, gathered[root])
    elif collective is Collective.ALL_GATHER:
        for source, (start, stop) in zip(gathered, split(values.size, len(gathered)), strict=True):
            values[start:stop] = source[start:stop]
    elif collective is not Collective.REDUCE or rank == root:
        np.copyto(values, gathered[0])
        for other in gathered[1:]:
            merge_kernel(dtype)(bits(values, dtype), bits(other, dtype))
