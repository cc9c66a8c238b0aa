"""A block of payloads that is in two places: on the device, where it is made and read, and where messages see it.

    block     what one message carries: the payloads of some pieces of a bucket, one behind the other
    host      pinned memory, from which it is sent and into which it is received
    device    the same bytes on the device; a copy on the stream keeps them alike

A codec's form on a device makes a task of each instruction, once for a bucket. `start` queues work on the current
stream and waits for nothing; `finish` is what the host has to do once the device has got there, before the block is
sent, merged or decoded.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Piece = tuple[int, int]  # first element in the bucket, and one past the last
Note = Callable[[], None]  # called where values were not finite


@dataclass(frozen=True, slots=True)
class Block:
    """The payloads of `pieces`, in the bytes between `spans`."""

    host: torch.Tensor  # uint8, pinned where there is a device
    device: torch.Tensor  # uint8, as large
    pieces: tuple[Piece, ...]
    spans: tuple[tuple[int, int], ...]  # first byte of each payload, and one past its last
    ordinals: tuple[int, ...] = ()  # which piece of the bucket each is, in the order of their places

    def payloads(self) -> Iterator[tuple[Piece, NDArray[np.uint8], torch.Tensor]]:
        """Yield each piece, its payload as the host sees it, and as the device does."""
        host: NDArray[np.uint8] = self.host.numpy()
        for piece, (start, stop) in zip(self.pieces, self.spans, strict=True):
            yield piece, host[start:stop], self.device[start:stop]


class Task(Protocol):
    """One instruction on one bucket."""

    def start(self) -> None:
        """Queue what the device has to do, on the current stream."""

    def finish(self) -> None:
        """Do what the host has to do afterwards."""


class DeviceForm(Protocol):
    """A codec on a device. Buckets and residuals are flat float32 tensors there, aligned with one another."""

    @property
    def queues(self) -> bool:
        """Whether it is a `QueuedForm` too."""

    def begin(self, count: int) -> int:
        """Begin with a bucket of `count` pieces: draw and return what its encodes start their random numbers from."""

    def encoder(self, bucket: torch.Tensor, residual: torch.Tensor | None, block: Block) -> Task:
        """Return what encodes the pieces of a block."""

    def decoder(self, block: Block, bucket: torch.Tensor, adds: bool, arrived: bool) -> Task:
        """Return what decodes a block, or adds what it holds; `arrived`: by a message, into `host`."""


class MergingForm(DeviceForm, Protocol):
    """The form of a codec whose blocks can be added without decoding them."""

    def merger(self, read: Block, write: Block, residual: torch.Tensor | None) -> Task:
        """Return what adds a block to another; what falls out is added to the residual, where there is one."""


class QueuedForm(Protocol):
    """A codec on a device that needs no host: sizes are known beforehand, NaN is seen to by kernels.

    `payloads` is memory there; byte `places[i]` is the first of piece i's payload.
    """

    def begin(self, count: int) -> int:
        """Begin with a bucket of `count` pieces; return what its encoders start their random numbers from."""

    def max_nbytes(self, numel: int) -> int:
        """Return how many bytes the payload of `numel` elements takes on the device, all of which are sent."""

    def compile(self) -> None:
        """Compile the kernels of all that was made to be queued, before the first of it is."""

    def queued_encoder(
        self,
        bucket: torch.Tensor,
        residual: torch.Tensor | None,
        payloads: torch.Tensor,
        pieces: Sequence[Piece],
        places: Sequence[int],
        ordinals: Sequence[int],
    ) -> Callable[[int], None]:
        """Return what queues the encode of all pieces, given what `begin` returned.

        A payload of what is not finite says so.
        """

    def queued_decoder(
        self,
        bucket: torch.Tensor,
        payloads: torch.Tensor,
        pieces: Sequence[Piece],
        places: Sequence[Sequence[int]],
        adds: bool,
    ) -> Callable[[], None]:
        """Return what queues the decode of all pieces from each source in turn; NaN for what was not finite.

        `places` has those of one source after those of another. What comes first is added, too, where `adds`.
        """

    def queued_look(self, bucket: torch.Tensor, pieces: Sequence[Piece]) -> "Look":
        """Return what finds out, behind everything else, whether a piece became NaN."""

    def replayed(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return what queues the kernels of `work` again and again, as one CUDA graph where that does the same."""


class QueuedMergingForm(QueuedForm, Protocol):
    """The form of a codec whose payloads can be added without decoding them."""

    def queued_merger(
        self,
        residual: torch.Tensor | None,
        payloads: torch.Tensor,
        pieces: Sequence[Piece],
        places: Sequence[int],
        others: Sequence[int],
    ) -> Callable[[], None]:
        """Return what queues the sum of two payloads of each piece, at `places` and at `others`, to `places`.

        What falls out is added to the residual, where there is one.
        """


class Look(Protocol):
    """What a bucket reports to the host, later."""

    def start(self) -> None:
        """Queue the look and a copy of what it finds."""

    def finish(self) -> None:
        """Tell what was found; the device has got there."""


def runs(pieces: Sequence[Piece]) -> list[Piece]:
    """Put pieces together that follow one another: one call for all of them.

    >>> runs([(0, 3), (3, 5), (9, 10)])
    [(0, 5), (9, 10)]
    """
    starts = [start for (_, stop), (start, _) in pairwise([(0, -1), *pieces]) if start != stop]
    stops = [stop for (_, stop), (start, _) in pairwise([*pieces, (-1, 0)]) if start != stop]
    return list(zip(starts, stops, strict=True))


def pinned(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return host memory that a device can be copied to while the host goes on."""
    return torch.zeros(numel, dtype=dtype, pin_memory=device.type == "cuda")
