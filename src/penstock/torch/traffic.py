"""Counts what a rank puts on the wire."""

from dataclasses import dataclass

from penstock.program import Collective
from penstock.runtime.transport import Array, Bytes, Work
from penstock.runtime.transport.c10d import C10dTransport


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank has sent, beside what the same gradients take dense."""

    sent_nbytes: int  # put on the wire; of the engine's own collectives, what a ring sends
    dense_nbytes: int  # what a dense ring all-reduce of the same gradients sends

    def __add__(self, other: "Traffic") -> "Traffic":
        """Return both together."""
        return Traffic(self.sent_nbytes + other.sent_nbytes, self.dense_nbytes + other.dense_nbytes)


def ring_nbytes(nbytes: int, world_size: int) -> int:
    """Return what each rank sends in a ring all-reduce: 2 (P - 1) / P of the tensor, the least any can do."""
    return 2 * (world_size - 1) * nbytes // world_size


class CountingTransport(C10dTransport):
    """torch.distributed, with a counter of the bytes sent."""

    sent_nbytes = 0

    def isend(self, view: Bytes, peer: int, tag: int) -> Work:  # type: ignore[override]  # any work will do
        """Count and start sending."""
        self.sent_nbytes += view.nbytes
        return super().isend(view, peer, tag)

    def native(self, collective: Collective, values: Array, dtype: str, root: int, seconds: float) -> None:
        """Count what a ring would send, and run the engine's own collective."""
        self.sent_nbytes += ring_nbytes(values.nbytes, self.world_size)
        super().native(collective, values, dtype, root, seconds)
