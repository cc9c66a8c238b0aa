"""What a codec could not send, kept for the next step: error feedback.

After every encode, gradient + residual before = decoded + residual after, element by element, each side one float32
operation (Karimireddy et al., 2019; 1-bit SGD, 2014). Nothing is lost, only late.

A `Residual` defers the subtraction: it keeps v = gradient + residual, and the payload that was made of it. What was not
sent is v - decode(payload), and the next encode subtracts it while it loads v anyway: three streams over memory (read
the gradient, read v, write v) where subtracting at once takes five. `values()` is the residual itself, whenever it is
needed: a checkpoint, another set of buckets, a test. The arithmetic is the same to the bit. (On the CPU only codecs
defer it whose decode is element-wise and whose feedback takes several passes; for others subtracting at once costs next
to nothing.)
"""

from bisect import bisect, bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.codecs.elements import as_array
from penstock.errors import CodecError


class Subtracts(Protocol):
    """The part of a codec that a residual calls."""

    def subtract(self, body: Any, values: Any) -> None:
        """Subtract the decoded body from `values`, in place."""

    def subtract_to(self, body: Any, values: Any, out: Any) -> None:
        """Write `values` minus the decoded body to `out`."""


@dataclass(slots=True)
class Residual:
    """The error of one tensor that is always encoded by the same codec.

    `memory` is float32, of the gradient's size, zero at first: a numpy array, or a torch tensor on the codec's device.
    """

    memory: Any
    pending: Any = None  # body of the last payload, not yet subtracted
    factor: float = 1.0  # what gradients are multiplied by before they are added, while they are read anyway
    codec: Subtracts | None = field(default=None, repr=False)  # the one that made the payload

    def values(self) -> Any:
        """Return what was not sent so far, in `memory` itself."""
        if self.pending is not None:
            assert self.codec is not None
            self.codec.subtract(self.pending, self.memory)
            self.pending = None
        return self.memory

    def defer(self, codec: Subtracts, body: Any) -> None:
        """Keep a copy of a payload, to be subtracted later; the buffer itself is the caller's."""
        self.codec = codec
        if self.pending is not None and len(self.pending) == len(body):
            self.pending[:] = body
        else:
            self.pending = body.copy() if isinstance(body, np.ndarray) else body.clone()

    def waits_for(self, codec: Subtracts) -> bool:
        """Return whether a payload of this codec is still to be subtracted; one of another codec is subtracted now."""
        if self.pending is not None and self.codec is not codec:
            self.values()
        return self.pending is not None


@dataclass(slots=True)
class DeferredResidual:
    """The residual of a bucket: flat memory, of which a program encodes pieces, each with its own deferred subtraction.

    A codec with `deferred_feedback` is given the pieces, any other the settled `values()`. One program at a time holds
    the pieces; another one settles them first: `generation` changes, and it asks for them again.
    """

    memory: NDArray[np.float32]
    generation: int = 0
    _pieces: dict[tuple[int, int], Residual] = field(default_factory=dict, repr=False)
    _room: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32), repr=False)

    def begin(self) -> None:
        """Settle and forget all pieces."""
        self.values()
        self._pieces = {}
        self.generation += 1

    def piece(self, start: int, stop: int, factor: float = 1.0) -> Residual:
        """Return the residual of some elements, whose gradients are to be multiplied; pieces are equal or disjoint."""
        found = self._pieces.setdefault((start, stop), Residual(self.memory[start:stop], factor=factor))
        assert found.factor == factor, (
            f"elements {start} to {stop} are multiplied once by {found.factor}, once by {factor}"
        )
        return found

    def values(self) -> NDArray[np.float32]:
        """Return what was not sent so far, in `memory` itself."""
        for piece in self._pieces.values():
            piece.values()
        return self.memory

    def copy_to(self, rooms: Sequence[NDArray[np.float32]]) -> None:
        """Write `values()` into rooms, one after the other; subtractions deferred here stay deferred.

        So sums of the next encode keep their order. Pieces that lie in one room are settled there, in the pass that
        copies them.
        """
        ends = list(accumulate(map(len, rooms), initial=0))
        for start, stop, piece in self._stretches():
            values, pending = self.memory[start:stop], None if piece is None else piece.pending
            first, last = bisect(ends, start) - 1, bisect_left(ends, stop)
            if piece is not None and pending is not None:
                assert piece.codec is not None
                if last - first == 1:
                    piece.codec.subtract_to(pending, values, rooms[first][start - ends[first] : stop - ends[first]])
                    continue
                values = self._settled(piece)
            for room, low in zip(rooms[first:last], ends[first:last], strict=True):
                here = room[max(start - low, 0) : stop - low]
                offset = max(low - start, 0)
                np.copyto(here, values[offset : offset + len(here)])

    def _stretches(self) -> Iterator[tuple[int, int, Residual | None]]:
        """Yield pieces in order, and what lies between them."""
        at = 0
        for (start, stop), piece in sorted(self._pieces.items(), key=itemgetter(0)):
            if at < start:
                yield at, start, None
            yield start, stop, piece
            at = stop
        if at < len(self.memory):
            yield at, len(self.memory), None

    def _settled(self, piece: Residual) -> NDArray[np.float32]:
        """Return the values of a piece elsewhere, in memory that the next piece takes too."""
        assert piece.codec is not None
        if len(self._room) < len(piece.memory):
            self._room = np.empty(len(piece.memory), np.float32)
        room = self._room[: len(piece.memory)]
        piece.codec.subtract_to(piece.pending, piece.memory, room)
        return room

    def forget(self) -> None:
        """Take the memory as it is: all of it has just been written."""
        for piece in self._pieces.values():
            piece.pending = None


def memory_of(residual: Any, numel: int, tensor: str) -> NDArray[np.float32] | None:
    """Return the memory of a residual, as it is or inside a `Residual` (which may still wait for a payload)."""
    if residual is None:
        return None
    kept = as_array(residual.memory if isinstance(residual, Residual) else residual)
    if kept.dtype != np.float32 or kept.size != numel:
        found = f"{kept.size} elements of {kept.dtype}"
        raise CodecError(f"the residual of {tensor} has {found}; wanted {numel} of float32")
    return kept
