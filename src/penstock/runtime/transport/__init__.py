"""What the executor asks of an engine: start a message, wait for it, and call the engine's own collective.

Three engines implement it: `memory` (threads of one process), `c10d` (torch.distributed: gloo) and `mpi`.
None is imported here: one engine does not need the others' packages.
"""

import atexit
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from time import monotonic
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from penstock.program import Collective

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Answer = TypeVar("Answer")

CHECK_TAG = 0  # of the messages that compare programs before data moves; data have tags from 1 to LAST_TAG
LAST_TAG = 32766
NOTE_TAG = 32767  # of notes that are read when messages no longer arrive; every MPI allows at least this
LANE_TAGS = NOTE_TAG + 1  # of each lane
EXIT_SECONDS = 10  # that a process may take to end, once a library has not answered
_LONG_SECONDS = 0.5  # between two questions whether a wait is vain
_gave_up = threading.Event()


def ring_nbytes(nbytes: int, world_size: int) -> int:
    """Return what each rank sends in a ring all-reduce: 2 (P - 1) / P of the tensor, the least any can do."""
    return 2 * (world_size - 1) * nbytes // world_size


class DeathError(ConnectionError):
    """Ranks that are known to have ended, in the order in which this rank learnt of it.

    The first is the cause: those after it may have died too, or have given up because of it and left.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        first, *others = [f"rank {rank}" for rank in ranks]
        super().__init__(f"{first} died" + (f"; since then {', '.join(others)} ended too" if others else ""))


class Work(Protocol):
    """A message on its way."""

    def wait(self, seconds: float) -> None:
        """Return when the message's memory may be used again.

        Raises `TimeoutError` after `seconds`, and `ConnectionError` where the peer is known to be gone.
        """


class Transport(Protocol):
    """An engine, as one rank sees it; with a true `takes_shorter`, a message may be shorter than its receive.

    The k-th message from one rank to another with a given tag fills the k-th receive for it. A send need not be
    finished before its receive is posted (rendezvous), and need not wait for it either.
    """

    @property
    def rank(self) -> int:
        """Which rank this is."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    @property
    def sent_nbytes(self) -> int:
        """The bytes that this rank has sent so far; of the engine's own collectives, what a ring would send."""

    def isend(self, view: Bytes, peer: int, tag: int) -> Work:
        """Start sending `view` to `peer`."""

    def irecv(self, view: Bytes, peer: int, tag: int) -> Work:
        """Start filling `view` from `peer`."""

    def native(self, collective: Collective, values: Array, dtype: str, root: int, seconds: float) -> None:
        """Run the engine's own collective on `values`, in place; errors as `Work.wait`."""


@runtime_checkable
class Lanes(Protocol):
    """An engine whose messages may be under way on several threads of a rank; one may do without."""

    def lane(self, number: int) -> Transport | None:
        """Return the same ranks for another thread: its messages meet those of the same lane only.

        Lane 0 is the engine itself, and alone has `native`, whose calls must come in one order on all ranks. None where
        the engine takes calls of one thread only.
        """


@runtime_checkable
class Notes(Protocol):
    """Lines that ranks leave for one another when messages no longer arrive; an engine may do without."""

    def leave_note(self, text: str) -> None:
        """Leave a line for the other ranks; raises nothing, as the caller is in trouble already."""

    def read_note(self, peer: int, seconds: float) -> str | None:
        """Return the line that `peer` left, or None where there is none within `seconds`.

        Raises `ConnectionError` where notes can no longer be read.
        """

    def finish_reading(self, peers: Collection[int], seconds: float) -> None:
        """Say that this rank needs no more notes; one that keeps them for others waits for those `peers` to say so."""

    def hang_up(self) -> None:
        """Let messages with this rank fail on all others, where the engine can, so that they read notes now."""


# Waits that end: for calls into a library that itself waits for ever


def never() -> bool:
    """Say that a wait is not vain."""
    return False


def within(seconds: float, call: Callable[[], Answer], silence: str, is_vain: Callable[[], bool] = never) -> Answer:
    """Return what `call` returns, or raise what it raises; raise `ConnectionError(silence)` where it takes longer.

    The thread that calls is given up then, and also when `is_vain`, which is asked now and then, says that no answer
    can come.
    """
    outcome: Future[Answer] = Future()
    thread = threading.Thread(target=_settle, args=(outcome, call), name="penstock-bounded", daemon=True)
    thread.start()
    deadline = monotonic() + seconds
    while not wait([outcome], min(_LONG_SECONDS, max(0.0, deadline - monotonic()))).done:
        if monotonic() >= deadline:
            end_in_time()
            raise ConnectionError(silence)
        if is_vain():
            end_in_time()
            raise ConnectionError("another rank has given up")
    return outcome.result()


def end_in_time() -> None:
    """Let this process end within some seconds after its script: a library's shutdown may wait for ever."""
    _gave_up.set()


def _set_alarm() -> None:
    if _gave_up.is_set():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(EXIT_SECONDS)


atexit.register(_set_alarm)  # as early as here, so that it is called late: after what a script has registered


def _settle(outcome: "Future[Answer]", call: Callable[[], Answer]) -> None:
    try:
        outcome.set_result(call())
    except BaseException as error:
        outcome.set_exception(error)
