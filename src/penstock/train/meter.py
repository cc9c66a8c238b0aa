"""Counts the bytes that this worker puts on the wire: what its NIC says, or what its wrapper knows it sent."""

from penstock.cluster.nics import sent_nbytes
from penstock.train.method import Wrapped


class Meter:
    """Bytes per iteration since the meter was made."""

    def __init__(self, wrapped: Wrapped, nic: str) -> None:
        """With `nic`, the kernel's counter of that interface is read: headers and all, and nobody else's traffic."""
        self._wrapped, self._nic = wrapped, nic
        self._before = wrapped.traffic()
        self._nic_before = sent_nbytes(nic) if nic else 0

    def per_iteration(self, iterations: int) -> tuple[float | None, float | None]:
        """Return the bytes sent, and those that a dense all-reduce would have sent."""
        if not iterations:
            return None, None
        now, before = self._wrapped.traffic(), self._before
        sent = sent_nbytes(self._nic) - self._nic_before if self._nic else now.sent_nbytes - before.sent_nbytes
        return sent / iterations, (now.dense_nbytes - before.dense_nbytes) / iterations
