"""Messages between devices in process groups of our own, in groups: what `queued` sends by.

NCCL runs them on the device, in the order of the stream; the host never waits. The ranks issue them in one order. On
gloo, where the same code is tested on host memory, the caller waits for each group.

A process group has one stream: the messages of a bucket wait behind all rounds of the bucket before, also while those
wait for kernels. With several process groups buckets take turns, and one's messages fill the other's gaps.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from penstock.runtime.device.mirror import Message
from penstock.runtime.device.queued import Bindings

NCCL = "nccl"
_OWN: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by the group whose ranks they have: connecting takes seconds
PROCESS_GROUPS = 1  # two were not tried on a GPU yet
MOST_BLOCKS = 4  # thread blocks of a group of messages: they take room from the model's kernels while they wait


class GroupedMessages:
    """Sends and receives, started together; buckets have the process groups in turn, which all have the same ranks."""

    def __init__(self, *groups: dist.ProcessGroup) -> None:
        self._groups, self._turn = groups, 0
        self.sent_nbytes, self.bindings = 0, Bindings()

    def take_turn(self) -> None:
        """Let what is started from now on go by the next process group; all ranks take turns alike."""
        self._turn = (self._turn + 1) % len(self._groups)

    def exchanging(self, messages: Sequence[Message]) -> Callable[[], None]:
        """Return what starts all messages together; the current stream waits for them, the host does not."""
        device = messages[0][1].device
        nbytes = sum(memory.nbytes for sent, memory, _ in messages if sent)
        calls = [
            [(group.send if sent else group.recv, [memory], peer) for sent, memory, peer in messages]
            for group in self._groups
        ]
        is_grouped = self._groups[0]._get_backend(device).supports_coalescing

        # What `batch_isend_irecv` does, without its checks of every message in every iteration: they took the host
        # longer than all kernels of a bucket.
        def exchange() -> None:
            self.sent_nbytes += nbytes
            group = self._groups[self._turn]
            group._start_coalescing(device)
            for start, memory, peer in calls[self._turn]:
                start(memory, peer, 0)
            group._end_coalescing(device).wait()

        def exchange_one_by_one() -> None:
            self.sent_nbytes += nbytes
            for work in [start(memory, peer, 0) for start, memory, peer in calls[self._turn]]:
                work.wait()

        return exchange if is_grouped else exchange_one_by_one

    def all_reduce(self, values: torch.Tensor) -> None:
        """Sum `values` over all ranks by the engine's own all-reduce."""
        group = self._groups[self._turn]
        world_size = dist.get_world_size(group)
        self.sent_nbytes += 2 * (world_size - 1) * values.nbytes // world_size
        dist.all_reduce(values, group=group)


def nccl_takes(ranks_here: int) -> bool:
    """Say whether NCCL connects so many ranks of this machine: it refuses two that have one host and one GPU.

    With NCCL_HOSTID set, as `penstock cluster run --gpus shared` does, every rank is a host of its own.
    """
    return dist.is_nccl_available() and (ranks_here <= torch.cuda.device_count() or "NCCL_HOSTID" in os.environ)


def device_messages(group: dist.ProcessGroup, timeout_seconds: float) -> GroupedMessages | None:
    """Return messages of our own between the current devices of a group's ranks, which must all call this together.

    None where NCCL does not carry the group's tensors on CUDA devices.
    """
    if not torch.cuda.is_available() or f"cuda:{NCCL}" not in dist.get_backend_config(group):
        return None
    if group not in _OWN:
        _OWN[group] = [_connected(group, timeout_seconds) for _ in range(PROCESS_GROUPS)]
    return GroupedMessages(*_OWN[group])


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
    dist.all_reduce(torch.zeros(1, device="cuda"), group=made)
    return made


def _options() -> Any:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = max(1, MOST_BLOCKS // PROCESS_GROUPS)
    return options
