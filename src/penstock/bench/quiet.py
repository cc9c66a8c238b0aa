"""Knows how much of this machine others use while ranks are being timed.

A benchmark on a shared machine either waits for others or measures them. The kernel counts the processor time of all
processes, and the ranks know their own; the difference is other people's work. Time in interrupts is nobody's: it is
where the kernel moves the ranks' packets.
"""

import os
import resource
from pathlib import Path
from time import monotonic, sleep

_TICKS = os.sysconf("SC_CLK_TCK")


def machine_seconds() -> float:
    """Return the processor seconds of all processes since the machine started, both in user and kernel mode."""
    user, nice, system = Path("/proc/stat").read_text().split(maxsplit=4)[1:4]
    return (int(user) + int(nice) + int(system)) / _TICKS


def own_seconds() -> float:
    """Return the processor seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def busy_share(seconds: float) -> float:
    """Sleep for a while and return the share of all processors' time that was used meanwhile."""
    before, start = machine_seconds(), monotonic()
    sleep(seconds)
    return (machine_seconds() - before) / (monotonic() - start) / processors()


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0))
