"""Messages between devices in a process group of our own, in groups: what `queued` sends by.

NCCL runs them on the device, in the order of the stream; the host never waits. The ranks issue them in one order. On
gloo, where the same code is tested on host memory, the caller waits for each group.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from penstock.runtime.cuda.direct import Message

NCCL = "nccl"
MOST_BLOCKS = 4  # thread blocks of a group of messages: they take room from the model's kernels while they wait


class GroupedMessages:
    """Sends and receives of one process group, started together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.sent_nbytes = 0

    def exchanging(self, messages: Sequence[Message]) -> Callable[[], None]:
        """Return what starts all messages together; the current stream waits for them, the host does not."""
        operations = [
            dist.P2POp(dist.isend if sent else dist.irecv, memory, group=self._group, group_peer=peer)
            for sent, memory, peer in messages
        ]
        nbytes = sum(memory.nbytes for sent, memory, _ in messages if sent)

        def exchange() -> None:
            self.sent_nbytes += nbytes
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        return exchange

    def all_reduce(self, values: torch.Tensor) -> None:
        """Sum `values` over all ranks by the engine's own all-reduce."""
        world_size = dist.get_world_size(self._group)
        self.sent_nbytes += 2 * (world_size - 1) * values.nbytes // world_size
        dist.all_reduce(values, group=self._group)


def device_messages(
    group: dist.ProcessGroup, device: torch.device, timeout_seconds: float
) -> GroupedMessages | None:
    """Return messages of our own between the ranks of a group of NCCL; every rank must call this at the same time.

    None where NCCL does not carry the group's tensors on `device`.
    """
    if device.type != "cuda" or NCCL not in dist.get_backend_config(group):
        return None
    ranks = dist.get_process_group_ranks(group)
    own = dist.new_group(
        ranks,
        timeout=timedelta(seconds=timeout_seconds),
        backend=NCCL,
        pg_options=_options(),
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
    assert isinstance(own, dist.ProcessGroup)  # every rank of the group is in it
    messages = GroupedMessages(own)
    messages.all_reduce(torch.zeros(1, device=device))  # connects all ranks: those of a round may be only some
    messages.sent_nbytes = 0
    return messages


def _options() -> Any:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # type: ignore[attr-defined]  # not on the CPU
    options.config.max_ctas = MOST_BLOCKS
    return options
