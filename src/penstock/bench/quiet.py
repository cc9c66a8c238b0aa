"""Measures how much of this machine other processes use, and lets ranks wait until it is quiet.

A benchmark on a shared machine either waits for others or measures them. Every process's own clock is added up, the
ranks' and the kernel's threads left out: the latter move the ranks' packets. Sums over the whole machine would not do,
since the kernel charges a process for the interrupts that happen to strike it.
"""

import contextlib
import os
from pathlib import Path
from time import monotonic, sleep

import numpy as np

from penstock.runtime.communicator import Communicator
from penstock.runtime.transport import Array

QUIET = 0.05  # of all processors' time: others may use so much while ranks are timed
_LOOK_SECONDS, _PAUSE_SECONDS = 0.2, 1.0  # at the machine; between two looks
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


def barrier(communicator: Communicator) -> None:
    """Return when all ranks are here; twice, because the first may find some of them asleep."""
    for _ in range(2):
        communicator.all_reduce(np.zeros(1), strategy="native")


def wait_until_idle(communicator: Communicator, patience: float) -> float:
    """Let all ranks sleep until no other process uses the machine; return the patience left.

    Rank 0 looks and decides for all: a rank that went on would keep the machine busy while another still waits.
    """
    while True:
        barrier(communicator)
        first = communicator.transport.rank == 0
        share = busy_share(_LOOK_SECONDS if first else 1.2 * _LOOK_SECONDS)  # all others sleep while rank 0 looks
        if gather(communicator, np.array([share]))[0, 0] < QUIET or patience <= 0:
            return patience
        sleep(_PAUSE_SECONDS)
        patience -= _PAUSE_SECONDS + _LOOK_SECONDS


def gather(communicator: Communicator, values: Array) -> Array:
    """Return all ranks' values, by rank."""
    everyone = np.zeros((communicator.transport.world_size, *values.shape))
    everyone[communicator.transport.rank] = values
    communicator.all_reduce(everyone, strategy="native")
    return everyone
