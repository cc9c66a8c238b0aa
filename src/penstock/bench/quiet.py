"""Knows how much of this machine others use while ranks are being timed.

A benchmark on a shared machine either waits for others or measures them. Every process's own clock is added up, the
ranks' and the kernel's threads left out: the latter move the ranks' packets. Sums over the whole machine would not do,
since the kernel charges a process for the interrupts that happen to strike it.
"""

import contextlib
import os
from pathlib import Path
from time import monotonic, sleep

_TICKS = os.sysconf("SC_CLK_TCK")
_KERNEL = 2  # the parent of its threads


def machine_seconds() -> float:
    """Return the processor seconds of all processes since the machine started, both in user and kernel mode."""
    user, nice, system = Path("/proc/stat").read_text().split(maxsplit=4)[1:4]
    return (int(user) + int(nice) + int(system)) / _TICKS


def process_seconds() -> dict[int, float]:
    """Return the processor seconds of every process but the kernel's own threads."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # it has just ended
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) not in (0, _KERNEL) or int(entry.name) == 1:
                found[int(entry.name)] = (int(fields[11]) + int(fields[12])) / _TICKS
    return found


def seconds_of_others(before: dict[int, float], after: dict[int, float], ours: set[int]) -> float:
    """Return what processes other than `ours` used between two looks."""
    return sum(seconds - before.get(process, 0.0) for process, seconds in after.items() if process not in ours)


def busy_share(seconds: float) -> float:
    """Sleep for a while and return the share of all processors' time that was used meanwhile."""
    before, start = machine_seconds(), monotonic()
    sleep(seconds)
    return (machine_seconds() - before) / (monotonic() - start) / processors()


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0))
