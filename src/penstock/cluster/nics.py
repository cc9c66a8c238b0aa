"""What the kernel counts at a network interface."""

from pathlib import Path


def sent_nbytes(nic: str) -> int:
    """Return how many bytes an interface of this process's network namespace has sent, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == nic:
            return int(counters.split()[8])
    raise AssertionError(f"no NIC called {nic} here")
