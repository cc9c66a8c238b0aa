"""Messages between devices in process groups of our own, in groups: what `queued` sends by.

NCCL runs them on the device, in the order of the stream; the host never waits. The ranks issue them in one order. On
gloo, where the same code is tested on host memory, the caller waits for each group.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from penstock.runtime.device.mirror import Message
from penstock.runtime.device.queued import Bindings, Flight
from penstock.runtime.transport.c10d import keep_device_group

NCCL = "nccl"
Call = tuple[Callable[..., Any], list[torch.Tensor], int]  # of a message: what starts it, its memory, its peer
# Connecting takes seconds, so groups are kept: by the group whose ranks they have, and what NCCL waits for a message.
_OWN: WeakKeyDictionary[Any, dict[float, Any]] = WeakKeyDictionary()
MOST_BLOCKS = 4  # thread blocks of a group of messages: they take room from the model's kernels while they wait


class GroupedMessages:
    """Sends and receives of a process group, started together; those of several buckets at a time."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._flights: list[Flight] = []  # buckets on their way, the oldest first
        self._works: list[Any] = []  # of the last group of messages; nothing waits for them yet
        self.sent_nbytes, self.bindings = 0, Bindings()

    def calls(self, messages: Sequence[Message]) -> list[Call]:
        """Return what starts each message."""
        group = self._group
        return [(group.send if sent else group.recv, [memory], peer) for sent, memory, peer in messages]

    def launch(self, flight: Flight, rooms: int = 1) -> None:
        """Queue the first stage of a bucket, and one of every bucket that is on its way; all ranks do alike.

        `rooms`: so many stages must lie between two buckets in one room.
        """
        self.sent_nbytes += flight.sent_nbytes
        if any(other.room.name == flight.room.name and other.advanced < rooms for other in self._flights):
            self.land()  # buckets came in another order than when they took their rooms
        self._flights.append(flight)
        self._advance()

    def behind(self, work: Callable[[], None]) -> None:
        """Do `work` once everything of all buckets so far is queued; at once where none is on its way."""
        if self._flights:
            most = max(flight.left for flight in self._flights)
            [flight for flight in self._flights if flight.left == most][-1].behind.append(work)
        else:
            work()

    def land(self) -> None:
        """Queue all that is left of all buckets on their way."""
        while self._flights:
            self._advance()

    def drop(self) -> None:
        """Forget all buckets on their way, after a failure."""
        self._flights, self._works = [], []

    def _advance(self) -> None:
        """Queue a stage of every bucket, the oldest first, then their messages as one group."""
        for work in self._works:
            work.wait()  # the current stream does, not the host
        calls = [call for flight in self._flights for call in flight.advance()]
        self._flights = [flight for flight in self._flights if flight.left]
        self._works = self._start(calls) if calls else []

    def _start(self, calls: Sequence[Call]) -> list[Any]:
        """Start messages together.

        What `batch_isend_irecv` does, without its checks of every message in every iteration: they took the host
        longer than all kernels of a bucket.
        """
        group, device = self._group, calls[0][1][0].device
        if not group._get_backend(device).supports_coalescing:
            return [start(memory, peer, 0) for start, memory, peer in calls]
        group._start_coalescing(device)
        for start, memory, peer in calls:
            start(memory, peer, 0)
        return [group._end_coalescing(device)]

    def all_reduce(self, values: torch.Tensor) -> None:
        """Sum `values` over all ranks by the engine's own all-reduce."""
        world_size = dist.get_world_size(self._group)
        self.sent_nbytes += 2 * (world_size - 1) * values.nbytes // world_size
        dist.all_reduce(values, group=self._group)


def nccl_takes(ranks_here: int) -> bool:
    """Say whether NCCL connects so many ranks of this machine: it refuses two that have one host and one GPU.

    With NCCL_HOSTID set, as `penstock cluster run --gpus shared` does, every rank is a host of its own.
    """
    return dist.is_nccl_available() and (ranks_here <= torch.cuda.device_count() or "NCCL_HOSTID" in os.environ)


def device_messages(group: dist.ProcessGroup, timeout_seconds: float) -> GroupedMessages | None:
    """Return messages of our own between the current devices of a group's ranks, which must all call this together.

    Those with one timeout share a group of NCCL. None where NCCL does not carry the group's tensors on CUDA devices.
    """
    if not torch.cuda.is_available() or f"cuda:{NCCL}" not in dist.get_backend_config(group):
        return None
    own = _OWN.setdefault(group, {})
    if timeout_seconds not in own:
        own[timeout_seconds] = _connected(group, timeout_seconds)
    return GroupedMessages(own[timeout_seconds])


def _connected(group: dist.ProcessGroup, timeout_seconds: float) -> dist.ProcessGroup:
    """Return a process group with the same ranks, connected: of a round's messages only some may have a part."""
    ranks = dist.get_process_group_ranks(group)
    made: dist.ProcessGroup = dist.new_group(
        ranks,
        timeout=timedelta(seconds=timeout_seconds),
        backend=NCCL,
        pg_options=_options(),
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
    keep_device_group(group, made)
    dist.all_reduce(torch.zeros(1, device="cuda"), group=made)
    return made


def _options() -> Any:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = MOST_BLOCKS
    return options
