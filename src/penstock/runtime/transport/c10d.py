"""torch.distributed as an engine: gloo, and NCCL's own collectives, through the documented interface only.

Messages are bytes whatever the element type. gloo aborts the process when a message is larger than its receive;
the tags that `executor` gives messages see to it that only equal calls meet. When a wait runs out of time gloo
closes all its connections, so that the other ranks fail at once and the group is of no more use.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Collection, Iterator
from copy import copy
from datetime import timedelta
from functools import cached_property, lru_cache, partial
from math import inf
from time import monotonic, sleep
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

import numpy as np
import torch
import torch.distributed as dist

from penstock.errors import StrategyError
from penstock.program import Collective, split
from penstock.runtime import transport
from penstock.runtime.transport import LANE_TAGS, NOTE_TAG, Array, Bytes, ring_nbytes
from penstock.runtime.transport.meeting import KEEPER, STORE, join_group, within

Answer = TypeVar("Answer")
_NOTE, _READ, _ALIVE = "penstock/note/", "penstock/read/", "penstock/alive"
_LOOK_SECONDS = 0.01  # between looks for a note
_ANSWER_SECONDS = 5.0  # of a store that is there, on a machine that is busy
_HANG_UP_SECONDS = 1e-3
UNCONNECTED = "NCCL did not connect the ranks within {:g} s"
_NOISE = re.compile(r"^\[[^]]*:\d+\] |\. This is typically caused by.*$")  # where in gloo, and advice we give ourselves


class C10dTransport:
    """A process group of torch.distributed; the default one where none is given."""

    takes_shorter = True  # gloo does; it aborts only where a message is longer than its receive

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        parent: dist.ProcessGroup | None = None,
        beside: Collection[dist.ProcessGroup] = (),
        most_seconds: float | None = None,
    ) -> None:
        """`parent`: of the same ranks, from which `group` was made: who fails in either finds the others' notes.

        `beside`: groups of these ranks, or of some, in which they may wait for one another too: they are hung up with
        this one, and leave their notes here. `most_seconds`: that a wait may take, where not the group's timeout.
        """
        self._group, self._parent, self._beside = group, parent, tuple(beside)
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.sent_nbytes = 0
        self._first_tag = 0  # of this lane
        self.store = _store(group)  # where the ranks met
        self._messages = _known(group)  # what torch's `isend` and `irecv` call, after checks that take as long
        self.group_name: str = self._messages.group_name
        timeout = group_timeout(_known(group))
        self._most_seconds = most_seconds or (inf if timeout is None else timeout.total_seconds())
        _wider.update((each, ref(self)) for each in beside)
        self._keeps_notes = self.store if parent is None else _store(parent)
        if parent is not None:
            for key in (_NOTE, f"{_NOTE}{self.rank}"):  # of an earlier failure
                _bounded(partial(self._keeps_notes.delete_key, key), _ANSWER_SECONDS)

    @cached_property
    def _notes(self) -> Any:
        """The store by a connection of its own: a call of torch's that waits keeps all others from the first."""
        return self._keeps_notes.clone()

    def lane(self, number: int) -> "C10dTransport":
        """Return the same group for another thread."""
        found = copy(self)
        found.sent_nbytes, found._first_tag = 0, number * LANE_TAGS
        found.group_name = f"{self.group_name}/{number}"  # its calls have numbers of their own
        return found

    def isend(self, view: Bytes, peer: int, tag: int) -> "_Work":
        """Start sending."""
        self.sent_nbytes += view.nbytes
        return _Work(
            self._messages.send, [torch.from_numpy(view)], peer, tag + self._first_tag, most=self._most_seconds
        )

    def irecv(self, view: Bytes, peer: int, tag: int) -> "_Work":
        """Start receiving."""
        return _Work(
            self._messages.recv, [torch.from_numpy(view)], peer, tag + self._first_tag, most=self._most_seconds
        )

    def leave_note(self, text: str, gives_up: bool = True) -> None:
        """Leave a line in the group's store; unless this rank `gives_up`, others read it only if they do."""
        with contextlib.suppress(ConnectionError):  # the store may have gone with the rank that kept it
            _bounded(lambda: self._notes.set(f"{_NOTE}{self.rank}", text), _ANSWER_SECONDS)
            if gives_up:
                _bounded(lambda: self._notes.set(_NOTE, "there is one"), _ANSWER_SECONDS)

    def is_given_up(self) -> bool:
        """Say whether a rank has left a note."""
        return bool(_bounded(lambda: self._notes.check([_NOTE]), _ANSWER_SECONDS))

    def show_alive(self, sign: str) -> None:
        """Leave a sign of life, another one than the last; raise `ConnectionError` where the store is gone."""
        _bounded(lambda: self._notes.set(_ALIVE, sign), _ANSWER_SECONDS)

    def sign_of_life(self, seconds: float) -> bytes:
        """Return what a rank left by `show_alive`, b"" before; raise `ConnectionError` if the store says nothing."""
        return _bounded(lambda: self._notes.get(_ALIVE) if self._notes.check([_ALIVE]) else b"", seconds)

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

    def finish_reading(self, peers: Collection[int], seconds: float) -> None:
        """Say that this rank has read its notes; rank 0, which may keep the store, stays until `peers` have too."""
        deadline = monotonic() + seconds
        with contextlib.suppress(ConnectionError):
            _bounded(lambda: self._notes.set(f"{_READ}{self.rank}", "1"), _ANSWER_SECONDS)
            while dist.get_rank() == 0 and monotonic() < deadline:
                if _bounded(lambda: self._notes.check([f"{_READ}{peer}" for peer in peers]), _ANSWER_SECONDS):
                    return
                sleep(_LOOK_SECONDS)

    def hang_up(self) -> None:
        """Let gloo close all connections, as it does when a wait runs out of time: for a message that no rank sends.

        Those of the parent too: with a rank gone it is of no more use, and others may wait for us there; NCCL's too.
        """
        abort_devices(self._group)
        if self._parent is not None:
            C10dTransport(self._parent).hang_up()
        for each in self._beside:
            C10dTransport(each).hang_up()
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
                work.wait(min(seconds, self._most_seconds))


_wider: WeakKeyDictionary[Any, "ref[C10dTransport]"] = WeakKeyDictionary()  # by groups that are beside them


def notes_of(group: dist.ProcessGroup | None) -> C10dTransport:
    """Return where the ranks of a group leave notes: with those of another, where it is beside that one."""
    found = _wider.get(_known(group))
    return (found and found()) or C10dTransport(group)


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Return how long calls of a group may take; None where its backend does not say."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)  # not all of torch's backends have them
        if options is not None:
            found: timedelta = options._timeout
            return found
    return None


# NCCL: kernels on the device wait for messages, and not the host. When a peer is gone torch's watchdog notes an error
# within a second, or at the group's timeout; it then sleeps for a minute, so that traces can be written, and ends the
# process. A thread of ours sees the note and aborts the communicator. Kernels end then, the host goes on, with memory
# that holds what no rank has sent, and the next to look at `device_failure` raises.


_of_ours: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()  # groups over NCCL, by the one of the same ranks
_watched: WeakSet[Any] = WeakSet()  # groups whose errors a thread looks for
_connected: WeakSet[Any] = WeakSet()
_WATCH_SECONDS = 0.2


def keep_device_group(group: dist.ProcessGroup, made: dist.ProcessGroup) -> None:
    """Remember a group of ours over NCCL that has the ranks of `group`: it fails, and is aborted, with that."""
    _of_ours.setdefault(group, []).append(made)


def device_failure(group: dist.ProcessGroup | None) -> str | None:
    """Return what torch's watchdog has found wrong with NCCL between a group's ranks; None: nothing, or no NCCL."""
    for backend in _nccl_backends(group):
        if (found := backend.get_error().name) != "SUCCESS":
            return f"NCCL gave up its messages ({found.lower().replace('_', ' ')})"
    return None


def watch_devices(group: dist.ProcessGroup) -> None:
    """Have a thread abort NCCL between the ranks of a group as soon as it has failed, unless one does already."""
    if group in _watched:
        return
    _watched.add(group)
    threading.Thread(target=_watch, args=(ref(group),), name="penstock-nccl", daemon=True).start()


def _watch(group: "ref[Any]") -> None:
    while (known := group()) is not None:
        if device_failure(known) is not None:
            abort_devices(known)
            return
        del known
        sleep(_WATCH_SECONDS)


def abort_devices(group: dist.ProcessGroup | None) -> None:
    """Give up all messages of NCCL between the ranks of a group, so that neither this rank nor others wait for them."""
    for backend in _nccl_backends(group):
        transport.end_in_time()  # NCCL's own shutdown may wait
        with contextlib.suppress(ConnectionError, RuntimeError):  # the caller is in trouble already
            transport.within(_ANSWER_SECONDS, backend.abort, "NCCL does not answer")


def connect_devices(
    group: dist.ProcessGroup, device: torch.device, seconds: float, is_vain: Callable[[], bool]
) -> None:
    """Have NCCL connect the ranks of a group, unless it has: by its first message, for which the host waits.

    NCCL waits for ever for a rank that does not come; `ConnectionError` is raised after `seconds`, or when `is_vain`.
    """
    if group in _connected:
        return
    watch_devices(group)

    def connect() -> None:
        with torch.cuda.device(device):  # which each thread has its own of
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            torch.cuda.synchronize(device)

    transport.within(seconds, connect, UNCONNECTED.format(seconds), is_vain)
    _connected.add(group)


def _nccl_backends(group: dist.ProcessGroup | None) -> Iterator[Any]:
    known = group or dist.group.WORLD
    if known is None:
        return
    for each in (known, *_of_ours.get(known, ())):
        for device in each._device_types:
            backend = each._get_backend(device) if device.type == "cuda" else None
            if backend is not None and hasattr(backend, "get_error"):  # of torch's own only NCCL's has it
                yield backend


def _bounded(ask: Callable[[], Answer], seconds: float) -> Answer:
    """Return what the store answers; raise `ConnectionError` where it is gone, or says nothing for so long."""
    try:
        return within(seconds, ask)
    except RuntimeError as error:
        raise ConnectionError(f"{STORE} is gone too: {KEEPER}") from error


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


def join_gloo() -> tuple[Callable[[], C10dTransport], Callable[[], None]]:
    """Return what makes groups of all ranks, and what ends the default group, which is made here where there is none.

    Each group has connections of its own: messages in one never meet those in another, or the user's.
    """
    ours = not dist.is_initialized()
    if ours:
        join_group("gloo")

    def connect() -> C10dTransport:
        timeout = group_timeout(_known(None))  # torch's own is half an hour
        return C10dTransport(dist.new_group(backend="gloo", timeout=timeout), parent=dist.group.WORLD)

    def close() -> None:
        if ours and dist.is_initialized():
            stop()

    return connect, close


def stop() -> None:
    """Take the default process group down."""
    dist.destroy_process_group()


class _Work:
    """A torch work whose failures have the names that `Work` promises; no wait is longer than `most` seconds."""

    __slots__ = ("_most", "_work")

    def __init__(self, start: Callable[..., Any], *arguments: Any, most: float = inf, **options: Any) -> None:
        self._most = most
        try:
            self._work = start(*arguments, **options)
        except RuntimeError as error:
            raise named(error) from error

    def wait(self, seconds: float) -> None:
        try:
            self._work.wait(_duration(min(seconds, self._most)))
        except RuntimeError as error:
            raise named(error) from error


@lru_cache(maxsize=64)
def _duration(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


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
