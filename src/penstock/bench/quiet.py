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
LOOK_SECONDS = 0.2
GLANCE_SECONDS = 1.0  # between two looks at a busy machine


def machine_seconds() -> float:
    """Return the processor seconds of all processes since the machine started, both in user and kernel mode."""
    user, nice, system = Path("/proc/stat").read_text().split(maxsplit=4)[1:4]
    return (int(user) + int(nice) + int(system)) / _TICKS


def own_seconds() -> float:
    """Return the processor seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def wait_until_idle(busy: float, patience_seconds: float) -> float:
    """Return when all processors together are busy for less than `busy` of their time; give up after a while.

    Returns the seconds waited. To be called while the ranks themselves do nothing.
    """
    start = monotonic()
    while True:
        before = machine_seconds()
        sleep(LOOK_SECONDS)
        share = (machine_seconds() - before) / LOOK_SECONDS / len(os.sched_getaffinity(0))
        waited = monotonic() - start
        if share < busy or waited > patience_seconds:
            return waited
        sleep(GLANCE_SECONDS)
