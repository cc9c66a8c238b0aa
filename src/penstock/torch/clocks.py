"""Clocks that can be read inside a backward pass without disturbing it, and the names of what they time.

The host's clock is right where a hook runs after the work is done, as on a CPU. On a GPU work is only queued when a
hook runs, so a mark is an event on the stream, and nothing waits for it until its time is asked for.
"""

import math
from collections.abc import Iterable
from time import perf_counter
from typing import Any, Protocol

import torch

from penstock.errors import ProfileError
from penstock.machine import processor

SHARED_SECONDS = 10e-6  # on the host: too short to queue a kernel


class Clock(Protocol):
    """Marks moments now, and tells later how far apart they were."""

    def start(self) -> Any:
        """Return the first mark of an iteration."""

    def mark(self) -> Any:
        """Return a mark of this moment, at once."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two marks, waiting for the later one if it has not come."""


class HostClock:
    """The monotonic clock of the host."""

    start = staticmethod(perf_counter)
    mark = staticmethod(perf_counter)

    def seconds(self, start: float, end: float) -> float:
        """Return end - start."""
        return end - start


class CudaClock:
    """Events on the stream that is current on `device` as an iteration starts; resolution about half a microsecond.

    Where the host can hardly keep the GPU busy, every microsecond of a mark is lost. So `marks` events are made
    beforehand (making one takes longer than recording it), and moments less than `SHARED_SECONDS` apart on the host
    share an event: nothing was queued between them, as between a normalisation's weight and its bias.
    """

    def __init__(self, device: torch.device, marks: int) -> None:
        self.device, self._stream = device, torch.cuda.current_stream(device)
        self._free = [_new_event() for _ in range(marks)]
        for event in self._free:
            event.record(self._stream)  # an event is only made when it is first recorded
        self._last, self._last_seconds = _new_event(), -math.inf

    def start(self) -> torch.cuda.Event:
        """Take the stream that is current now, and mark it."""
        self._stream, self._last_seconds = torch.cuda.current_stream(self.device), -math.inf
        return self.mark()

    def mark(self) -> torch.cuda.Event:
        """Queue an event behind the work queued so far."""
        if perf_counter() - self._last_seconds > SHARED_SECONDS:
            self._last = self._free.pop() if self._free else _new_event()
            self._last.record(self._stream)
            self._last_seconds = perf_counter()
        return self._last

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the time between two events."""
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def clock_for(device: torch.device, marks: int) -> Clock:
    """Return the clock that times work on `device`, ready for about `marks` marks."""
    if device.type == "cuda":
        return CudaClock(device, marks)
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


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what was queued on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """Return what a person would call `device`: the GPU's name, or the processor's and its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{processor()}, {threads} thread{'' if threads == 1 else 's'}"
