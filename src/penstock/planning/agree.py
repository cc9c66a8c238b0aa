"""How the ranks of a job agree while they plan: small values, gathered from all ranks or told by rank 0.

torch's process group does it in torch (`GroupRanks` in `torch/collective_errors.py`); here is the same over an engine
of our own, for ranks of MPI and for ranks that are threads of one process.
"""

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from penstock.errors import PenstockError, PlanError, TransportError
from penstock.runtime.hosts import Nodes, group_by_host, this_host
from penstock.runtime.transport import CHECK_TAG, Bytes, Transport

Made = TypeVar("Made")
WAIT_SECONDS = 300.0  # for the slowest rank to come


class Ranks(Protocol):
    """All ranks of a job; every rank must make the same calls at the same time."""

    @property
    def rank(self) -> int:
        """Which rank this is."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return every rank's value, by rank; `what` is done, in words, should a rank be gone."""

    def from_first(self, value: Any, what: str) -> Any:
        """Return rank 0's value; that of other ranks is not looked at."""


class TransportRanks:
    """The ranks of an engine of ours; values travel pickled, by way of rank 0."""

    def __init__(self, transport: Transport, timeout_seconds: float = WAIT_SECONDS) -> None:
        self._transport, self._timeout_seconds = transport, timeout_seconds
        self.rank, self.world_size = transport.rank, transport.world_size

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return every rank's value, by rank."""
        if self.rank != 0:
            self._do(partial(self._send, pickle.dumps(value), 0), what, 0)
            return list(self.from_first(None, what))
        others = [self._received(peer, what) for peer in range(1, self.world_size)]
        return list(self.from_first([value, *others], what))

    def from_first(self, value: Any, what: str) -> Any:
        """Return rank 0's value."""
        if self.rank != 0:
            return self._received(0, what)
        for peer in range(1, self.world_size):
            self._do(partial(self._send, pickle.dumps(value), peer), what, peer)
        return value

    def _received(self, peer: int, what: str) -> Any:
        return pickle.loads(self._do(partial(self._receive, peer), what, peer))

    def _send(self, text: bytes, peer: int) -> None:
        """Send a text behind its length."""
        for part in (np.array([len(text)], np.int64).view(np.uint8), np.frombuffer(text, np.uint8).copy()):
            self._transport.isend(part, peer, CHECK_TAG).wait(self._timeout_seconds)

    def _receive(self, peer: int) -> bytes:
        length = np.zeros(1, np.int64)
        self._transport.irecv(length.view(np.uint8), peer, CHECK_TAG).wait(self._timeout_seconds)
        text: Bytes = np.zeros(int(length[0]), np.uint8)
        self._transport.irecv(text, peer, CHECK_TAG).wait(self._timeout_seconds)
        return text.tobytes()

    def _do(self, action: Callable[[], Made], what: str, peer: int) -> Made:
        try:
            return action()
        except (TimeoutError, ConnectionError) as error:
            raise TransportError("planning", self.rank, f"{peer}, {what}", None, str(error)) from error


def from_rank_0(make: Callable[[], Made], ranks: Ranks) -> Made:
    """Return what `make` returns on rank 0, on every rank; it is called on rank 0 only.

    What it raises is raised on every rank.
    """
    told: tuple[Made | None, str] = (None, "")
    if ranks.rank == 0:
        try:
            told = (make(), "")
        except PenstockError as error:
            told = (None, f"{type(error).__name__}: {error}")
    made, complaint = ranks.from_first(told, "sharing the plan")
    if complaint or made is None:
        raise PlanError(f"rank 0 could not plan: {complaint}")
    return made  # type: ignore[no-any-return]  # what rank 0's `make` returned


def nodes_of(ranks: Ranks) -> Nodes:
    """Return the ranks of each host; every rank must call this at the same time."""
    return group_by_host(ranks.gather(this_host(), "gathering where ranks are"))
