"""Counts the bytes that this worker puts on the wire: what its NIC says, or what its wrapper knows it sent."""

from pathlib import Path

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


def sent_nbytes(nic: str) -> int:
    """Return how many bytes an interface of this process's network namespace has sent."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == nic:
            return int(counters.split()[8])
    raise AssertionError(f"no NIC called {nic} here")
