"""Counts what a rank puts on the wire."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from penstock.plan import Route
from penstock.program import Collective
from penstock.run_record import RouteUse
from penstock.runtime.transport import Array, Bytes, ForwardedNotes, Transport, Work


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank has sent, beside what the same gradients take dense."""

    sent_nbytes: int  # put on the wire; of the engine's own collectives, what a ring sends
    dense_nbytes: int  # what a dense ring all-reduce of the same gradients sends

    def __add__(self, other: "Traffic") -> "Traffic":
        """Return both together."""
        return Traffic(self.sent_nbytes + other.sent_nbytes, self.dense_nbytes + other.dense_nbytes)


@dataclass(frozen=True, slots=True)
class Used:
    """How one bucket, or a stretch of one, really travelled in an iteration."""

    name: str
    route: Route
    nbytes: int  # of its gradients
    sent_nbytes: int  # put on the wire by this rank


def by_route(used: Iterable[Used]) -> tuple[RouteUse, ...]:
    """Return what each route carried, all its messages together."""
    found: dict[Route, list[Used]] = {}
    for each in used:
        found.setdefault(each.route, []).append(each)
    return tuple(
        RouteUse(str(route), len(parts), sum(each.nbytes for each in parts), sum(each.sent_nbytes for each in parts))
        for route, parts in found.items()
    )


def sparse_nbytes(values: Any, world_size: int) -> Traffic:
    """Return what a rank sends of a sparse tensor (torch's COO): indices and values, to every other rank.

    Dense is what a ring sends of all its elements.
    """
    indices, kept = values._indices(), values._values()
    sent = (world_size - 1) * (indices.numel() * indices.element_size() + kept.numel() * kept.element_size())
    return Traffic(sent, ring_nbytes(values.numel() * values.element_size(), world_size))


def ring_nbytes(nbytes: int, world_size: int) -> int:
    """Return what each rank sends in a ring all-reduce: 2 (P - 1) / P of the tensor, the least any can do."""
    return 2 * (world_size - 1) * nbytes // world_size


class CountingTransport(ForwardedNotes):
    """Any engine, with a counter of the bytes sent."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size
        self.takes_shorter = getattr(inner, "takes_shorter", False)
        self.group_name: str = getattr(inner, "group_name", "")
        self.sent_nbytes = 0

    def isend(self, view: Bytes, peer: int, tag: int) -> Work:
        """Count and start sending."""
        self.sent_nbytes += view.nbytes
        return self._inner.isend(view, peer, tag)

    def irecv(self, view: Bytes, peer: int, tag: int) -> Work:
        """Start receiving."""
        return self._inner.irecv(view, peer, tag)

    def native(self, collective: Collective, values: Array, dtype: str, root: int, seconds: float) -> None:
        """Count what a ring would send, and run the engine's own collective."""
        self.sent_nbytes += ring_nbytes(values.nbytes, self.world_size)
        self._inner.native(collective, values, dtype, root, seconds)
