"""Rounds that all ranks time together: the slowest rank's time counts, and all of them return the same."""

import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.program import Collective
from penstock.runtime.hosts import Nodes, this_machine
from penstock.runtime.nodes import exchange_hosts
from penstock.runtime.pages import fresh_pages
from penstock.runtime.transport import Bytes, Transport

WAIT_SECONDS = 60.0  # for the slowest rank to come
SIZES = tuple(1 << exponent for exponent in range(10, 25, 2))  # 1 KiB to 16 MiB
PILOTS = 1  # untimed rounds that open connections and find out how many timed ones the budget allows
LEAST, _MOST = 3, 50  # timed rounds per size
SMALL = 1e-12  # of the values sent: sums of sums must not overflow
SHARE = 0.06  # of the budget, for one size
_SURELY = 1 << 22  # measured whatever the budget: below 4 MiB a busy machine's noise hides the bandwidth

Round = Callable[[Transport, Bytes, Bytes], None]  # does once what is timed, on two buffers of one size
Answer = TypeVar("Answer")
Points = list[tuple[float, float]]  # (bytes, seconds per round)


def largest(transport: Transport, value: float, timeout_seconds: float = WAIT_SECONDS) -> float:
    """Return the largest of all ranks' values; none returns before all have come.

    Each rank fills its own place, and a sum brings them together: engines differ in which maxima they offer.
    """
    return float(gathered(transport, value, timeout_seconds).max())


def gathered(transport: Transport, value: float, timeout_seconds: float = WAIT_SECONDS) -> NDArray[np.float64]:
    """Return all ranks' values, by rank."""
    everyone = np.zeros(transport.world_size)
    everyone[transport.rank] = value
    transport.native(Collective.ALL_REDUCE, everyone, "float64", 0, timeout_seconds)
    return everyone


def agreed_points(transport: Transport, one_round: Round, seconds: float) -> Points:
    """Measure growing sizes until the budget is spent."""
    points: Points = []
    left = seconds
    for size in SIZES:
        first, second = plain_values(size), fresh_pages(size)
        pilot = agreed_seconds(transport, one_round, first, second, PILOTS)
        rounds = min(max(int(SHARE * seconds / pilot), LEAST), _MOST)
        points.append((float(size), agreed_seconds(transport, one_round, first, second, rounds)))
        left -= rounds * points[-1][1]
        if size >= _SURELY and LEAST * 4 * points[-1][1] > left:  # the next size is four times as large
            break
    return points


def agreed_seconds(transport: Transport, one_round: Round, first: Bytes, second: Bytes, rounds: int) -> float:
    """Return how long a round takes, of so many back to back."""
    largest(transport, 0.0)  # start together
    start = perf_counter()
    for _ in range(rounds):
        one_round(transport, first, second)
    return max(largest(transport, (perf_counter() - start) / rounds), 1e-9)


class CoreClock:
    """Measures what rounds take of the cores for each rank, on average; every rank must make one at the same time.

    That is what the process takes, since the engine's own threads move messages, and a rank's part of what the kernel
    does for packets, which no process is charged for (8% more for a ring with onebit, where links are emulated).
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._ranks_here = next(len(ranks) for ranks in machines(transport) if transport.rank in ranks)

    def seconds(self, work: Callable[[], Answer]) -> tuple[Answer, float]:
        """Return what some rounds answer, and what they take of the cores; all ranks return the same."""
        used, packets = process_time(), packet_seconds()
        answer = work()
        used, packets = process_time() - used, packet_seconds() - packets
        return answer, float(gathered(self._transport, used + packets / self._ranks_here).mean())


def machines(transport: Transport) -> Nodes:
    """Return the ranks of each machine, whatever lies between them on the network: emulated hosts are one."""
    return exchange_hosts(transport, this_machine(), WAIT_SECONDS)


def packet_seconds() -> float:
    """Return what interrupts have taken of all cores since this machine was started; 0 where that is not known."""
    try:
        fields = Path("/proc/stat").read_text().split(maxsplit=8)
    except OSError:  # not Linux
        return 0.0
    return (int(fields[6]) + int(fields[7])) / os.sysconf("SC_CLK_TCK")  # irq, softirq


def noise(nbytes: int) -> Bytes:
    """Return small Gaussian values: what a codec does may depend on them."""
    pages = fresh_pages(nbytes)
    values = pages.view(np.float32)
    np.random.default_rng(nbytes).standard_normal(dtype=np.float32, out=values)
    values *= np.float32(SMALL)
    return pages


def plain_values(nbytes: int) -> Bytes:
    """Return small values that are all the same: dense messages do not look at them, and they are made at once."""
    pages = fresh_pages(nbytes)
    pages.view(np.float32).fill(SMALL)
    return pages
