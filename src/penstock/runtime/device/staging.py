"""Tensors in device memory, for engines that move host memory: fetched to pinned memory and brought back, in pieces.

Copies run on a stream of their own. It waits for what the caller's stream has been given so far, and the caller's
stream waits for the last copy back; the host waits only for the events of single pieces. The device as a whole is
never waited for, so kernels on other streams go on. Reduction happens on the host, by the same code in the same
order as for host tensors, so the results have the same bits.
"""

from collections.abc import Iterator, Sequence

import torch

from penstock.runtime.pieces import Pieces
from penstock.runtime.schedule import Action


class Staging:
    """Pinned memory and a stream for each device; one tensor at a time."""

    def __init__(self) -> None:
        self._lanes: dict[torch.device, _Lane] = {}

    def stage(self, tensor: torch.Tensor) -> "Staged":
        """Return a place in host memory for a contiguous tensor on a device; nothing is copied yet."""
        if tensor.device not in self._lanes:
            self._lanes[tensor.device] = _Lane(tensor.device)
        return Staged(tensor.detach().view(-1), self._lanes[tensor.device])


class Staged:
    """One tensor on its way through host memory; `host` has its values while `walk` runs."""

    def __init__(self, tensor: torch.Tensor, lane: "_Lane") -> None:
        self._tensor, self._lane = tensor, lane
        self.host = lane.memory(tensor.nbytes).view(tensor.dtype)

    def walk(self, pieces: Pieces, actions: Sequence[Action]) -> Iterator[Action]:
        """Yield the actions, each when the pieces it needs are in host memory; send pieces back when finished."""
        lane = self._lane
        lane.stream.wait_stream(torch.cuda.current_stream(self._tensor.device))
        arrived = lane.events(len(pieces.bounds))
        for (start, stop), event in zip(pieces.bounds, arrived, strict=True):
            self._copy(self.host, self._tensor, start, stop)
            event.record(lane.stream)
        for position, action in enumerate(actions):
            for piece in pieces.needed.get(position, ()):
                arrived[piece].synchronize()
            yield action
            for piece in pieces.finished.get(position, ()):
                self._copy(self._tensor, self.host, *pieces.bounds[piece])
        torch.cuda.current_stream(self._tensor.device).wait_stream(lane.stream)

    def _copy(self, into: torch.Tensor, source: torch.Tensor, start: int, stop: int) -> None:
        with torch.cuda.stream(self._lane.stream):
            into[start:stop].copy_(source[start:stop], non_blocking=True)


class _Lane:
    """The way between one device and the host: a stream, pinned memory that only grows, and events used again."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._events: list[torch.cuda.Event] = []

    def memory(self, nbytes: int) -> torch.Tensor:
        """Return pinned memory; what the last call left in it has been read once the stream gets there."""
        if nbytes > self._memory.numel():
            self.stream.synchronize()  # the last copies out of the old memory
            self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return self._memory[:nbytes]

    def events(self, count: int) -> list[torch.cuda.Event]:
        """Return so many events; the host sleeps while it waits for one, instead of keeping a core busy."""
        self._events += [_event() for _ in range(count - len(self._events))]
        return self._events[:count]


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    return event
