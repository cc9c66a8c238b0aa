"""torch.distributed as an engine: gloo, and NCCL's own collectives, through the documented interface only.

Messages are bytes whatever the element type. gloo aborts the process when a message is larger than its receive;
the tags that `executor` gives messages see to it that only equal calls meet. When a wait runs out of time gloo
closes all its connections, so that the other ranks fail at once and the group is of no more use.
"""

import contextlib
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from penstock.errors import StrategyError
from penstock.program import Collective, split
from penstock.runtime.transport import NOTE_TAG, Array, Bytes, ring_nbytes
from penstock.runtime.transport.meeting import join_group

Answer = TypeVar("Answer")
_NOTE = "penstock/note/"
_LOOK_SECONDS = 0.01  # between looks for a note
_ANSWER_SECONDS = 5.0  # of a store that is there, on a machine that is busy
_HANG_UP_SECONDS = 1e-3
_NOISE = re.compile(r"^\[[^]]*:\d+\] |\. This is typically caused by.*$")  # where in gloo, and advice we give ourselves


class C10dTransport:
    """A process group of torch.distributed; the default one where none is given."""

    takes_shorter = True  # gloo does; it aborts only where a message is longer than its receive

    def __init__(self, group: dist.ProcessGroup | None = None, parent: dist.ProcessGroup | None = None) -> None:
        """`parent`: of the same ranks, from which `group` was made: who fails in either finds the others' notes."""
        self._group, self._parent = group, parent
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.sent_nbytes = 0
        self.store = _store(group)  # where the ranks met
        self.group_name: str = _known(group).group_name
        self._notes = self.store if parent is None else _store(parent)
        if parent is not None:
            self._notes.delete_key(f"{_NOTE}{self.rank}")  # of an earlier failure

    def isend(self, view: Bytes, peer: int, tag: int) -> "_Work":
        """Start sending."""
        self.sent_nbytes += view.nbytes
        return _Work(dist.isend, torch.from_numpy(view), group=self._group, tag=tag, group_dst=peer)

    def irecv(self, view: Bytes, peer: int, tag: int) -> "_Work":
        """Start receiving."""
        return _Work(dist.irecv, torch.from_numpy(view), group=self._group, tag=tag, group_src=peer)

    def leave_note(self, text: str) -> None:
        """Leave a line in the group's store."""
        with contextlib.suppress(ConnectionError):  # the store may have gone with the rank that kept it
            _bounded(lambda: self._notes.set(f"{_NOTE}{self.rank}", text), _ANSWER_SECONDS)

    def read_note(self, peer: int, seconds: float) -> str | None:
        """Return the line that `peer` left in the group's store."""
        key, deadline = f"{_NOTE}{peer}", monotonic() + seconds

        def look() -> str | None:
            while not self._notes.check([key]):
                if monotonic() > deadline:
                    return None
                sleep(_LOOK_SECONDS)
            return str(self._notes.get(key), "utf-8")

        return _bounded(look, seconds + _ANSWER_SECONDS)

    def hang_up(self) -> None:
        """Let gloo close all connections, as it does when a wait runs out of time: for a message that no rank sends.

        Those of the parent too: with a rank gone it is of no more use, and others may wait for us there.
        """
        if self._parent is not None:
            C10dTransport(self._parent).hang_up()
        room = np.zeros(1, np.uint8)
        for peer in {*range(self.world_size)} - {self.rank}:
            try:
                self.irecv(room, peer, NOTE_TAG).wait(_HANG_UP_SECONDS)
            except TimeoutError:
                return
            except ConnectionError:  # to this one there is no connection any more
                continue

    def native(self, collective: Collective, values: Array, dtype: str, root: int, seconds: float) -> None:
        """Run the engine's own collective."""
        self.sent_nbytes += ring_nbytes(values.nbytes, self.world_size)
        if dtype == "int16":
            raise StrategyError("native on torch.distributed: no int16; choose another strategy, or int32")
        tensor = torch.from_numpy(values.view(np.uint8)).view(getattr(torch, dtype))
        if tensor.numel():
            for work in _NATIVE[collective](tensor, self._group, root):
                work.wait(seconds)


def _bounded(ask: Callable[[], Answer], seconds: float) -> Answer:
    """Return what the store answers; raise `ConnectionError` where it is gone, or says nothing for so long.

    torch waits for a store for ever, and the rank that keeps it may hang. Then the thread that asks is given up.
    """
    answers: list[Answer] = []
    thread = threading.Thread(target=_collect, args=(ask, answers), name="penstock-note", daemon=True)
    thread.start()
    thread.join(seconds)
    if not answers:
        what = "does not answer" if thread.is_alive() else "is gone too"
        raise ConnectionError(f"the store in which the ranks met {what}: rank 0 keeps it, unless torchrun does")
    return answers[0]


def _collect(ask: Callable[[], Answer], answers: list[Answer]) -> None:
    with contextlib.suppress(RuntimeError):
        answers.append(ask())


def _store(group: dist.ProcessGroup | None) -> Any:
    """Return where the ranks of a group met; it outlives the connections between them."""
    return _known(group).get_group_store()


def _known(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    known = group or dist.group.WORLD
    assert known is not None  # the group has a rank
    return known


def start_gloo() -> C10dTransport:
    """Make the default process group of torch.distributed, over gloo, from the environment torchrun sets."""
    join_group("gloo")
    return C10dTransport()


def stop() -> None:
    """Take the default process group down."""
    dist.destroy_process_group()


class _Work:
    """A torch work whose failures have the names that `Work` promises."""

    __slots__ = ("_work",)

    def __init__(self, start: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        try:
            self._work = start(*arguments, **options)
        except RuntimeError as error:
            raise named(error) from error

    def wait(self, seconds: float) -> None:
        try:
            self._work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            raise named(error) from error


def named(error: RuntimeError) -> Exception:
    """Return what a torch error means; torch has one class for all of them."""
    text = _NOISE.sub("", str(error).splitlines()[0])
    return TimeoutError(text) if "timed out" in text.lower() else ConnectionError(text)


def _all_reduce(tensor: torch.Tensor, group: Any, _root: int) -> list[_Work]:
    return [_Work(dist.all_reduce, tensor, group=group, async_op=True)]


def _reduce(tensor: torch.Tensor, group: Any, root: int) -> list[_Work]:
    return [_Work(dist.reduce, tensor, group=group, async_op=True, group_dst=root)]


def _broadcast(tensor: torch.Tensor, group: Any, root: int) -> list[_Work]:
    return [_Work(dist.broadcast, tensor, group=group, async_op=True, group_src=root)]


def _all_gather(tensor: torch.Tensor, group: Any, _root: int) -> list[_Work]:
    """One call where the chunks are equal; gloo takes no others, so else each rank broadcasts its own."""
    world_size = dist.get_world_size(group)
    chunks = [tensor[start:stop] for start, stop in split(tensor.numel(), world_size)]
    if tensor.numel() % world_size == 0:
        return [_Work(dist.all_gather, chunks, chunks[dist.get_rank(group)].clone(), group=group, async_op=True)]
    return [work for root, chunk in enumerate(chunks) if chunk.numel() for work in _broadcast(chunk, group, root)]


_NATIVE: dict[Collective, Callable[[torch.Tensor, Any, int], list[_Work]]] = {
    Collective.ALL_REDUCE: _all_reduce,
    Collective.REDUCE: _reduce,
    Collective.BROADCAST: _broadcast,
    Collective.ALL_GATHER: _all_gather,
    Collective.REDUCE_SCATTER: _all_reduce,  # gloo has none; the sum of all chunks includes rank r's
}
