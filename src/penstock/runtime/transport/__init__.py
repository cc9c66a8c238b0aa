"""What the executor asks of an engine: start a message, wait for it, and call the engine's own collective.

Three engines implement it: `memory` (threads of one process), `c10d` (torch.distributed: gloo) and `mpi`.
None is imported here: one engine does not need the others' packages.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from penstock.program import Collective

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

CHECK_TAG = 0  # of the messages that compare programs before data moves; data have tags from 1 to LAST_TAG
LAST_TAG = 32766
NOTE_TAG = 32767  # of notes that are read when messages no longer arrive; every MPI allows at least this


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
class Notes(Protocol):
    """Lines that ranks leave for one another when messages no longer arrive; an engine may do without."""

    def leave_note(self, text: str) -> None:
        """Leave a line for the other ranks; raises nothing, as the caller is in trouble already."""

    def read_note(self, peer: int, seconds: float) -> str | None:
        """Return the line that `peer` left, or None where there is none within `seconds`.

        Raises `ConnectionError` where notes can no longer be read.
        """

    def hang_up(self) -> None:
        """Let messages with this rank fail on all others, where the engine can, so that they read notes now."""
