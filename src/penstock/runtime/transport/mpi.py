"""MPI as an engine: non-blocking messages, polled.

MPI moves data only while it is called, so a rank that waits polls, and gives the processor away between polls: with
more ranks than cores a rank that spins keeps its peer from sending. Where a rank dies, `mpirun` ends all
others, unless it was started with `--with-ft ulfm`: then messages with it fail. The first rank to see it revokes
the communicator, so that messages between survivors fail too, at once: none waits for a rank that has given up.

A large message to another host goes in segments below Open MPI's eager limit. Without them a broadcast of 16 MB along
4 hosts at 1 Gb/s took 195 ms with sixteen blocks in flight and 143 with two; with them 132 with sixteen (one run each,
bound 128). It looks as if Open MPI's protocol for large messages served all messages in flight in turn, so that the
first block of a pipeline arrives as late as the last; we have not traced it.
"""

import contextlib
import os
from collections.abc import Callable, Collection
from copy import copy
from functools import partial
from math import inf
from time import monotonic, sleep
from typing import Any

import numpy as np

from penstock.errors import StrategyError
from penstock.program import Collective, split
from penstock.runtime.connect import WITHOUT_SUMS, start_mpi
from penstock.runtime.transport import (
    LANE_TAGS,
    NOTE_TAG,
    Array,
    Bytes,
    DeathError,
    end_in_time,
    never,
    ring_nbytes,
    within,
)

start_mpi()
from mpi4py import MPI  # noqa: E402  # which would start it itself, in a wait without end

SEGMENT_NBYTES = 32 * 1024  # below Open MPI's eager limit of 64 KB over TCP
_POLLS_PER_LOOK = 256  # at the clock
SPIN_SECONDS = 1e-3  # without pause, before a wait begins to rest
_NOTE_NBYTES = 4096  # of which a note needs a few hundred
_LOOK_SECONDS = 1e-3  # between looks for a note
MAKING_SECONDS = 300.0  # for all ranks to make a communicator
_AT_FIRST = 2  # copies of COMM_WORLD: a wrapper's own, and one to measure with
_NEWS_SECONDS = 5.0  # for hearing who died, after a survivor revoked the communicator
_FAILED, _REVOKED = (getattr(MPI, name, None) for name in ("ERR_PROC_FAILED", "ERR_REVOKED"))  # of MPI 5


def place_in_world() -> tuple[int, int, bool]:
    """Return this process's rank in COMM_WORLD, how many there are, and whether any thread may call MPI."""
    world = MPI.COMM_WORLD
    return world.Get_rank(), world.Get_size(), MPI.Query_thread() >= MPI.THREAD_SERIALIZED


class MpiTransport:
    """A communicator of MPI; COMM_WORLD where none is given.

    It is duplicated, by all ranks together, so that messages of the user's own never meet ours. MPI has a limited
    number of copies, and Open MPI 5.0 crashes now and then where a rank dies while one is made: those of COMM_WORLD are
    made with the first transport, and `close` keeps them for the next. `native` calls the non-blocking collectives,
    which can be given up after a time, or with `blocking_native` the others, which Open MPI tunes better and which wait
    for ever. With `rest_seconds`, a wait that takes long sleeps so long between two polls: for ranks that compute at
    the same time on the same cores. No wait is longer than `most_seconds`; that for the copy ends too when `is_vain`
    says that it cannot be made.
    """

    def __init__(
        self,
        comm: Any = None,
        blocking_native: bool = False,
        rest_seconds: float = 0.0,
        most_seconds: float = inf,
        is_vain: Callable[[], bool] = never,
    ) -> None:
        given = MPI.COMM_WORLD if comm is None else comm
        try:
            self._copy = _copied(given, min(most_seconds, MAKING_SECONDS), is_vain)
        except MPI.Exception as error:
            raise _named(given, error, revokes=False) from error
        self._comm, self._near, self._lanes = self._copy
        self._is_world, self._is_closed = given == MPI.COMM_WORLD, False
        self._rank, self._world_size = int(self._comm.Get_rank()), int(self._comm.Get_size())
        self._blocking_native, self._rest_seconds, self._most_seconds = blocking_native, rest_seconds, most_seconds
        self._left: list[Any] = []  # notes on their way
        self._first_tag = 0  # of this lane
        self.sent_nbytes = 0

    @property
    def rank(self) -> int:
        """Which rank of the communicator this is."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many ranks the communicator has."""
        return self._world_size

    def lane(self, number: int) -> "MpiTransport | None":
        """Return the same communicator for another thread, where MPI takes calls of several and has tags for them."""
        if number >= self._lanes:
            return None
        found = copy(self)
        found.sent_nbytes, found._first_tag = 0, number * LANE_TAGS
        return found

    def isend(self, view: Bytes, peer: int, tag: int) -> "_Work":
        """Start sending.

        Segments are sent synchronously: each ends when its receive is posted, which bounds what piles up at a slow
        receiver. A short message does not wait for that: its acknowledgement would double the time of a small ring.
        """
        self.sent_nbytes += view.nbytes
        tag += self._first_tag
        if view.size <= SEGMENT_NBYTES or peer in self._near:
            return _Work(self._comm, self._comm.Isend, [view], peer, tag, self._rest_seconds, self._most_seconds)
        return _Work(self._comm, self._comm.Issend, _segments(view), peer, tag, self._rest_seconds, self._most_seconds)

    def irecv(self, view: Bytes, peer: int, tag: int) -> "_Work":
        """Start receiving."""
        views = [view] if peer in self._near else _segments(view)
        return _Work(
            self._comm, self._comm.Irecv, views, peer, self._first_tag + tag, self._rest_seconds, self._most_seconds
        )

    def native(self, collective: Collective, values: Array, dtype: str, root: int, seconds: float) -> None:
        """Run MPI's own collective."""
        self.sent_nbytes += ring_nbytes(values.nbytes, self._world_size)
        if dtype in WITHOUT_SUMS["mpi"]:
            raise StrategyError(f"native on MPI: no {dtype}; choose another strategy, or float32")
        if not values.size:
            return
        arguments = _NATIVE[collective](self._comm, values, root)
        name = _NAMES[collective]
        try:
            if self._blocking_native:
                getattr(self._comm, name)(*arguments)
                return
            request = getattr(self._comm, f"I{name.lower()}")(*arguments)
        except MPI.Exception as error:
            raise _named(self._comm, error) from error
        _wait(self._comm, request, min(seconds, self._most_seconds), self._rest_seconds)

    def close(self) -> None:
        """Give the copy back; all ranks together, none of whose messages is under way. Once is enough."""
        if self._is_closed or MPI.Is_finalized():
            return
        self._is_closed = True
        if self._is_world:
            _idle.append(self._copy)
        else:
            self._comm.Free()

    def leave_note(self, text: str) -> None:
        """Send a line to every other rank; it is short enough to leave at once."""
        line = np.frombuffer(text.encode()[:_NOTE_NBYTES].ljust(_NOTE_NBYTES), np.uint8)
        self._left = []  # kept until they have gone
        for peer in {*range(self._world_size)} - {self._rank}:
            with contextlib.suppress(MPI.Exception):  # that peer is dead; the others are not
                self._left.append(self._comm.Isend([line, MPI.BYTE], peer, NOTE_TAG))

    def read_note(self, peer: int, seconds: float) -> str | None:
        """Return the line that `peer` sent, in whatever lane.

        It is probed for, and not awaited: memory that is given to a receive stays MPI's until a message comes.
        """
        line, deadline = np.zeros(_NOTE_NBYTES, np.uint8), monotonic() + seconds
        try:
            while (note := self._comm.Improbe(peer, NOTE_TAG)) is None:
                if monotonic() > deadline:
                    return None
                sleep(_LOOK_SECONDS)
            note.Recv([line, MPI.BYTE])
        except MPI.Exception:  # the peer is dead
            return None
        return line.tobytes().decode(errors="replace").strip()

    def finish_reading(self, peers: Collection[int], seconds: float) -> None:
        """Do nothing: notes were sent to each rank, and none keeps them for others."""

    def hang_up(self) -> None:
        """Do nothing: only under ULFM could the others be told, and there they were, when it was known who died."""


_Copy = tuple[Any, frozenset[int], int]  # a communicator, the ranks of this host, how many lanes all ranks can have
_idle: list[_Copy] = []  # of COMM_WORLD; the same on all ranks, which make and close transports together


def _copied(given: Any, seconds: float, is_vain: Callable[[], bool]) -> _Copy:
    """Return a copy of a communicator.

    MPI has no calls for it that can be given up; where only one thread may call MPI, this one waits for ever.
    """
    if given != MPI.COMM_WORLD:
        return _make_copies(given, 1, seconds, is_vain)[0]
    if not _idle:
        _idle.extend(_make_copies(given, _AT_FIRST, seconds, is_vain))
    return _idle.pop()


def _make_copies(given: Any, count: int, seconds: float, is_vain: Callable[[], bool]) -> list[_Copy]:
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        return _copies(given, count)
    silence = f"no communicator of MPI within {seconds:g} s: all ranks make it together"
    return within(seconds, partial(_copies, given, count), silence, is_vain)


def _copies(given: Any, count: int) -> list[_Copy]:
    comms = [given.Dup() for _ in range(count)]
    for comm in comms:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
    near, lanes = _ranks_of_this_host(comms[0]), comms[0].allreduce(_lanes(), MPI.MIN)
    return [(comm, near, lanes) for comm in comms]


def _ranks_of_this_host(comm: Any) -> frozenset[int]:
    near = comm.Split_type(MPI.COMM_TYPE_SHARED)
    ranks = frozenset(near.allgather(comm.Get_rank()))
    near.Free()
    return ranks


def _lanes() -> int:
    """Return how many threads may send at a time, each with tags of its own."""
    largest = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or NOTE_TAG
    return int(largest + 1) // LANE_TAGS if MPI.Query_thread() >= MPI.THREAD_MULTIPLE else 1


def _segments(view: Bytes) -> list[Bytes]:
    return [view[start : start + SEGMENT_NBYTES] for start in range(0, view.size, SEGMENT_NBYTES)]


class _Work:
    """The requests of one message, whose failures have the names that `Work` promises."""

    __slots__ = ("_comm", "_most_seconds", "_requests", "_rest_seconds")

    def __init__(
        self,
        comm: Any,
        start: Callable[..., Any],
        views: list[Bytes],
        peer: int,
        tag: int,
        rest_seconds: float,
        most_seconds: float,
    ) -> None:
        self._comm, self._rest_seconds, self._most_seconds = comm, rest_seconds, most_seconds
        try:
            self._requests = [start([view, MPI.BYTE], peer, tag) for view in views]
        except MPI.Exception as error:
            raise _named(comm, error) from error

    def wait(self, seconds: float) -> None:
        for request in self._requests:
            _wait(self._comm, request, min(seconds, self._most_seconds), self._rest_seconds)


def _wait(comm: Any, request: Any, seconds: float, rest_seconds: float) -> None:
    test = request.Test
    try:
        if test():
            return
        started = monotonic()
        while (waited := monotonic() - started) < seconds:
            resting = rest_seconds and waited > SPIN_SECONDS
            for _ in range(1 if resting else _POLLS_PER_LOOK):
                if test():
                    return
                sleep(rest_seconds) if resting else os.sched_yield()
    except MPI.Exception as error:
        raise _named(comm, error) from error
    end_in_time()
    raise TimeoutError(f"nothing for {seconds:g} s")


def _named(comm: Any, error: Any, revokes: bool = True) -> ConnectionError:
    """Return the error with the ranks that died, where MPI knows them (`mpirun --with-ft ulfm`), and tell the others.

    MPI lists the dead in the order in which this process heard of them. Without `revokes` the communicator is the
    user's, and stays as it is. Ranks that left a note had given up before they left: then the communicator stays too,
    so that notes can be read, which say with whom it began.
    """
    end_in_time()
    kind = error.Get_error_class()
    if kind not in (_FAILED, _REVOKED) and (_FAILED is None or not _dead(comm)):  # some calls name a death otherwise
        return ConnectionError(str(error))
    if revokes and kind == _FAILED and (gone := _dead(comm)) and all(_left_note(comm, rank) for rank in gone):
        return ConnectionError(f"rank {gone[0]} gave up and left")
    if revokes:
        comm.Revoke()
    deadline = monotonic() + _NEWS_SECONDS
    while not (ranks := _dead(comm)) and monotonic() < deadline:
        MPI.COMM_SELF.Iprobe()  # lets MPI hear of it: the revocation may have come first
        sleep(1e-3)
    return DeathError(ranks) if ranks else ConnectionError("another rank gave up because one died")


def _left_note(comm: Any, rank: int) -> bool:
    """Say whether a note of a rank has arrived."""
    try:
        return bool(comm.Iprobe(rank, NOTE_TAG))
    except MPI.Exception:  # there is none, and none will come
        return False


def _dead(comm: Any) -> list[int]:
    dead, everyone = comm.Get_failed(), comm.Get_group()
    return list(MPI.Group.Translate_ranks(dead, list(range(dead.Get_size())), everyone))


def _all_reduce(_comm: Any, values: Array, _root: int) -> tuple[Any, ...]:
    return MPI.IN_PLACE, values


def _reduce(comm: Any, values: Array, root: int) -> tuple[Any, ...]:
    return (MPI.IN_PLACE, values, MPI.SUM, root) if comm.Get_rank() == root else (values, None, MPI.SUM, root)


def _broadcast(_comm: Any, values: Array, root: int) -> tuple[Any, ...]:
    return values, root


def _all_gather(comm: Any, values: Array, _root: int) -> tuple[Any, ...]:
    bounds = split(values.size, comm.Get_size())
    counts, starts = [stop - start for start, stop in bounds], [start for start, _ in bounds]
    return MPI.IN_PLACE, [values, (counts, starts)]


_NATIVE: dict[Collective, Callable[[Any, Array, int], tuple[Any, ...]]] = {  # the arguments of the call
    Collective.ALL_REDUCE: _all_reduce,
    Collective.REDUCE: _reduce,
    Collective.BROADCAST: _broadcast,
    Collective.ALL_GATHER: _all_gather,
    Collective.REDUCE_SCATTER: _all_reduce,  # MPI's own leaves the chunk elsewhere than in its place
}
_NAMES = {
    Collective.ALL_REDUCE: "Allreduce",
    Collective.REDUCE: "Reduce",
    Collective.BROADCAST: "Bcast",
    Collective.ALL_GATHER: "Allgatherv",
    Collective.REDUCE_SCATTER: "Allreduce",
}


def shut_down() -> None:
    """End MPI for this process, together with all others: for a process that leaves without the interpreter's end."""
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()
