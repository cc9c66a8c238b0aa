"""Memory in two places: pinned on the host, where messages see it, and on a device, where kernels do.

Copies between the two are queued on the current stream. A `Mark` is a place in the stream that the host can wait for;
the device as a whole is never waited for. Tensors in host memory are a device too, where nothing is ever under way:
that is how all of this is tested without a GPU.
"""

from typing import Any

import numpy as np
import torch

from penstock.codecs.payload_block import pinned
from penstock.runtime.views import Scratch, bytes_at

Message = tuple[bool, torch.Tensor, int]  # whether it is sent, its memory on a device, and the other rank


class Mirror(Scratch):
    """Scratch memory that is also on a device; programs share it, as they run one after another."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.host = torch.empty(0, dtype=torch.uint8)
        self.there = torch.empty(0, dtype=torch.uint8, device=device)
        self.used = Mark(device)  # what the last program queued

    def reserve(self, nbytes: int) -> None:
        """Make the memory at least so large; it never shrinks."""
        if nbytes > self.host.numel():
            self.used.wait()
            self.host = pinned(nbytes, torch.uint8, self.device)
            self.memory, self.address = self.host.numpy(), self.host.data_ptr()
            self.there = torch.empty(nbytes, dtype=torch.uint8, device=self.device)


class Mark:
    """A place in the current stream, set again and again; the host sleeps while it waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, _event() if device.type == "cuda" else None

    def set(self) -> None:
        """Stand behind what the current stream has been given so far."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Return when the device has got there; at once where it was never set."""
        if self._event is not None:
            self._event.synchronize()


def view_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return a view of memory on a device that its owner keeps alive."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        return torch.as_tensor(_Memory(address, nbytes), device=device)
    return torch.from_numpy(bytes_at(address, nbytes))


class _Memory:
    """What torch takes for memory on a CUDA device."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,), "typestr": np.dtype(np.uint8).str, "data": (address, False), "version": 3,
        }  # fmt: skip


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    return event
