"""Clocks that can be read inside a backward pass without disturbing it, and the names of what they time.

The host's clock is right where a hook runs after the work is done, as on a CPU. On a GPU work is only queued when a
hook runs, so a mark is an event on the stream, and nobody waits for it until its time is asked for.
"""

import platform
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch

from penstock.errors import ProfileError


class Clock(Protocol):
    """Marks moments now, and tells later how far apart they were."""

    def mark(self) -> Any:
        """Return a mark of this moment, at once."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two marks, waiting for the later one if it has not come."""


class HostClock:
    """The monotonic clock of the host."""

    mark = staticmethod(perf_counter)

    def seconds(self, start: float, end: float) -> float:
        """Return end - start."""
        return end - start


class CudaClock:
    """Events on whichever stream is current on `device`; resolution about half a microsecond."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> torch.cuda.Event:
        """Queue an event behind the work queued so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the time between two events."""
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


def clock_for(device: torch.device) -> Clock:
    """Return the clock that times work on `device`."""
    if device.type == "cuda":
        return CudaClock(device)
    if device.type == "cpu":
        return HostClock()
    raise ProfileError(f"parameters on {device.type!r}; penstock times work on cpu and cuda")


def one_device(devices: Iterable[torch.device]) -> torch.device:
    """Return the only device among `devices`."""
    found = sorted({str(device) for device in devices})
    if len(found) != 1:
        where = " and ".join(found) or "no device"
        raise ProfileError(f"parameters that learn on {where}; wanted all on one device")
    return torch.device(found[0])


def device_name(device: torch.device) -> str:
    """Return what a person would call `device`: the GPU's name, or the processor's and its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'' if threads == 1 else 's'}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
