"""NCCL as an engine: data by its point-to-point messages in groups, the comparing of programs through the store.

Only who gives it to a `Communicator` uses it: the wrapper leaves dense buckets on NCCL to NCCL's own all-reduce.

NCCL has no tags and no timeout of ours: its messages run on the device after the call returned. A rank that dies is
noticed by torch's watchdog, which ends the process. Calls that were compared once are not told apart later.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from penstock.errors import StrategyError
from penstock.program import Collective, Program, split
from penstock.runtime.device.direct import Direct, Message
from penstock.runtime.executor import program_digest
from penstock.runtime.transport import Array, Bytes
from penstock.runtime.transport.c10d import C10dTransport

_KEY = "penstock/message/"


class NcclTransport:
    """A process group of NCCL; tensors stay on their device."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group, self._inner = group, C10dTransport(group)
        self._store = self._inner.store
        self._counts: dict[tuple[int, int, int], int] = {}  # messages so far from, to, with tag

    @property
    def rank(self) -> int:
        """Which rank of the group this is."""
        return self._inner.rank

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return self._inner.world_size

    def isend(self, view: Bytes, peer: int, tag: int) -> "_StoreWork":
        """Leave host bytes in the group's store; only the comparing of programs does this."""
        key = self._key(self.rank, peer, tag)
        self._store.set(key, view.tobytes())
        return _StoreWork(self._store, key, None)

    def irecv(self, view: Bytes, peer: int, tag: int) -> "_StoreWork":
        """Take host bytes from the group's store, when waited for."""
        return _StoreWork(self._store, self._key(peer, self.rank, tag), view)

    def native(self, collective: Collective, values: Array, dtype: str, root: int, seconds: float) -> None:
        """Refuse: values are in host memory."""
        raise StrategyError(f"{collective.value} on host memory; NCCL moves device memory: pass tensor.cuda()")

    def prepare_on_device(self, program: Program, dtype: str) -> Direct:
        """Return this rank's part of a program, to be run on the device."""
        return Direct(program, self.rank, dtype, program_digest(program, dtype, None), self)

    def exchange(self, messages: Sequence[Message]) -> None:
        """Start messages as one group; the current stream waits for them, the host does not."""
        operations = [
            dist.P2POp(dist.isend if sent else dist.irecv, memory, group=self._group, group_peer=peer)
            for sent, memory, peer in messages
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def collective(self, collective: Collective, tensor: torch.Tensor, root: int) -> None:
        """Run NCCL's own collective on the current stream."""
        _NATIVE[collective](tensor, self._group, root)

    def _key(self, source: int, target: int, tag: int) -> str:
        count = self._counts[source, target, tag] = self._counts.get((source, target, tag), -1) + 1
        return f"{_KEY}{source}/{target}/{tag}/{count}"


class _StoreWork:
    """A message through the store: a send is done at once, a receive when the other rank has left it there."""

    def __init__(self, store: Any, key: str, view: Bytes | None) -> None:
        self._store, self._key, self._view = store, key, view

    def wait(self, seconds: float) -> None:
        """Return when the message is here."""
        if self._view is None:
            return
        try:
            self._store.wait([self._key], timedelta(seconds=max(seconds, 1e-3)))
            self._view[:] = np.frombuffer(self._store.get(self._key), np.uint8)
            self._store.delete_key(self._key)
        except RuntimeError as error:
            raise TimeoutError(f"nothing for {seconds:g} s") from error


def _all_gather(tensor: torch.Tensor, group: Any, _root: int) -> None:
    for rank, (start, stop) in enumerate(split(tensor.numel(), dist.get_world_size(group))):
        if start < stop:
            dist.broadcast(tensor[start:stop], group=group, group_src=rank)


_NATIVE: dict[Collective, Callable[[torch.Tensor, Any, int], Any]] = {
    Collective.ALL_REDUCE: lambda tensor, group, _: dist.all_reduce(tensor, group=group),
    Collective.REDUCE: lambda tensor, group, root: dist.reduce(tensor, group=group, group_dst=root),
    Collective.BROADCAST: lambda tensor, group, root: dist.broadcast(tensor, group=group, group_src=root),
    Collective.ALL_GATHER: _all_gather,
    Collective.REDUCE_SCATTER: lambda tensor, group, _: dist.all_reduce(tensor, group=group),
}
