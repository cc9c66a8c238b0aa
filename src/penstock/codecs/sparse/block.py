"""How a sparse block lies in a message: k values, then where they stand.

    header (`header.py`)   codec "sparse", parameters density, value bits and index form
    values                 k float32, or k bfloat16 (the upper halves of float32), padded to 4 bytes
    indices                k int32, ascending; or as gaps in base 128 (`entry_kernels.write_gaps`); none where all
                           elements are sent

The number of entries follows from the density and the tensor, so it is not sent; that a merged block has as many as
the two it was made of is what keeps gTop-k's messages from growing. Gaps have no 32-bit limit: a block of a tensor of
2^31 elements or more is always written with them. A density whose entries and indices would take more bytes than all
values sends all values, without indices: a block is never longer than the dense tensor.
"""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.codecs.elements import Floats, from_float32, to_float32
from penstock.codecs.sparse.entry_kernels import ascending_below, read_gaps, write_gaps
from penstock.errors import CodecError

Bytes = NDArray[np.uint8]
Indices = NDArray[Any]  # int32, or int64 for tensors of 2^31 elements and more
INDEX_FORMS = ("int32", "gaps", "smaller")
VALUE_BITS = (32, 16)
_INT32_NUMEL = 1 << 31


@dataclass(frozen=True, slots=True)
class Entries:
    """A sparse vector."""

    indices: Indices  # strictly ascending
    values: Floats


def entry_count(density: float, numel: int) -> int:
    """Return k = max(1, round(density numel)), and 0 of nothing.

    >>> [entry_count(0.001, numel) for numel in (0, 3, 1_000, 25_000_000)]
    [0, 1, 1, 25000]
    """
    return min(numel, max(1, round(density * numel)))


def index_dtype(numel: int) -> type[np.signedinteger[Any]]:
    """Return the integers that count the elements of a tensor."""
    return np.int32 if numel < _INT32_NUMEL else np.int64


def largest_gaps_nbytes(count: int, numel: int) -> int:
    """Return the most bytes that `count` gaps in a tensor of `numel` elements can take.

    All gaps together are less than `numel`, so at most `numel >> 7` of them need a second byte, and so on.

    >>> largest_gaps_nbytes(25_000, 25_000_000)
    51525
    """
    total, digits = count, numel >> 7
    while digits:
        total += min(count, digits)
        digits >>= 7
    return total


@dataclass(frozen=True, slots=True)
class BlockForm:
    """The body of the blocks of one tensor."""

    numel: int  # elements of the tensor
    count: int  # entries
    value_bits: int
    gaps: bool

    @property
    def whole(self) -> bool:
        """Whether every element is sent, in order: then indices are not."""
        return self.count == self.numel

    @classmethod
    def of(cls, numel: int, count: int, value_bits: int, index_form: str) -> "BlockForm":
        """Return the form of a tensor's blocks; `smaller` takes the indices whose largest size is less.

        >>> [BlockForm.of(1000, count, 32, "int32").count for count in (1, 499, 500, 1000)]  # 8 bytes an entry
        [1, 499, 1000, 1000]
        """
        smaller = largest_gaps_nbytes(count, numel) < 4 * count
        gaps = index_form == "gaps" or (index_form == "smaller" and smaller) or numel >= _INT32_NUMEL
        some, whole = cls(numel, count, value_bits, gaps), cls(numel, numel, value_bits, False)
        return some if some.max_nbytes < whole.max_nbytes else whole

    @property
    def values_nbytes(self) -> int:
        """Bytes before the indices."""
        return -(-self.count * self.value_bits // 32) * 4

    @property
    def max_nbytes(self) -> int:
        """Bytes a body takes at most; without gaps, always."""
        return self.values_nbytes + (largest_gaps_nbytes(self.count, self.numel) if self.gaps else self._index_nbytes)

    @property
    def _index_nbytes(self) -> int:
        return 0 if self.whole else 4 * self.count

    def write(self, entries: Entries, body: Bytes) -> int:
        """Write a body of `count` entries; return its bytes."""
        assert entries.indices.size == self.count
        values, indices = self._values(body), body[self.values_nbytes :]
        if self.value_bits == 32:
            values[:] = entries.values
        else:
            from_float32(entries.values, values)
        if self.gaps:
            return self.values_nbytes + int(write_gaps(entries.indices, indices))
        indices[: self._index_nbytes].view(np.int32)[:] = entries.indices if not self.whole else ()
        return self.max_nbytes

    def read(self, body: Bytes, room: Indices) -> Entries:
        """Return the entries of a body, or raise `CodecError` for bytes that `write` cannot have written.

        They share the memory of the body, except that indices which are not in it as such are put into `room`.
        """
        if body.size < self.values_nbytes + (0 if self.gaps else self._index_nbytes) or body.size > self.max_nbytes:
            raise CodecError(f"sparse body of {body.size} bytes for {self.count} entries: it is damaged")
        body = aligned(body)
        data = body[self.values_nbytes :]
        if self.gaps:
            indices = room[: self.count]
            good = read_gaps(data, self.numel, indices)
        elif self.whole:
            indices = room[: self.count]
            indices[:] = np.arange(self.count, dtype=indices.dtype)
            good = True
        else:
            indices = data.view(np.int32)
            good = ascending_below(indices, self.numel)
        if not good:
            raise CodecError(f"sparse indices are not ascending from 0 to below {self.numel}: the block is damaged")
        return Entries(indices, to_float32(self._values(body)))

    def rounded(self, values: Floats) -> Floats:
        """Return what a receiver will read for these values."""
        if self.value_bits == 32:
            return values
        halves = np.empty(values.size, np.uint16)
        from_float32(values, halves)
        return to_float32(halves)

    def _values(self, body: Bytes) -> NDArray[Any]:
        width = self.value_bits // 8
        return body[: self.count * width].view(np.float32 if width == 4 else np.uint16)


class Rooms(threading.local):
    """Memory to work in, of its own in every thread; it grows and is kept, since fresh memory costs page faults."""

    def __init__(self) -> None:
        self._rooms: dict[tuple[str, type[Any]], NDArray[Any]] = {}

    def get(self, name: str, numel: int, dtype: type[Any]) -> NDArray[Any]:
        """Return the room called `name` with so many elements; what it held before may be anything."""
        room = self._rooms.get((name, dtype))
        if room is None or room.size < numel:
            room = self._rooms[name, dtype] = np.zeros(numel, dtype)
        return room[:numel]


def aligned(data: Bytes) -> Bytes:
    """Return the bytes at an address that numbers can be read from: a copy where they lie at another."""
    return data if data.__array_interface__["data"][0] % 4 == 0 else data.copy()
