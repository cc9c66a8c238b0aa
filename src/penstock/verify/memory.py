"""What the ranks hold while a program runs on symbols: whose contributions, to which element, summed in which order.

A value is an expression over the ranks' own data. Addition of floating-point numbers is commutative but not
associative, so `a + b` and `b + a` are the same expression while `(a + b) + c` and `a + (b + c)` are not: two ranks
that end with the same expression end with the same bits.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from penstock.program import DATA, Program, Slice


class Expressions:
    """Numbers the expressions that occur; equal ones get the same number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}
        self._masks: list[int] = []
        self._parts: list[tuple[int, ...]] = []  # the expressions that each is made of

    def own(self, rank: int) -> int:
        """Return the expression of a rank's own data."""
        return self._number(("own", rank), 1 << rank, ())

    def add(self, one: int, other: int) -> int:
        """Return the sum of two expressions."""
        low, high = sorted((one, other))
        return self._number(("add", low, high), self._masks[one] | self._masks[other], (low, high))

    def coded(self, one: int, unit: "Unit") -> int:
        """Return what is left of an expression in the output of a codec that saw all of `unit`."""
        key = ("coded", one, unit.encoder, unit.pieces, unit.offset)
        return self._number(key, self._masks[one], (one,))

    def merged(self, one: int, unit: "Unit") -> int:
        """Return what is left of a sum of encoded blocks in a block of the same size."""
        return self._number(("merged", one, unit.pieces, unit.offset), self._masks[one], (one,))

    def native(self, parts: tuple[int, ...]) -> int:
        """Return the sum as the engine forms it, in an order of its own, but the same on all ranks."""
        mask = 0
        for part in parts:
            mask |= self._masks[part]
        return self._number(("native", *parts), mask, parts)

    def contributors(self, expression: int) -> int:
        """Return the bit set of the ranks whose data is in the expression."""
        return self._masks[expression]

    def terms(self, expression: int) -> Counter[int]:
        """Return how often each rank's own data, and each codec output, is added up in an expression.

        A codec's output is a number of its own: it is not what was encoded.
        """
        found: Counter[int] = Counter()
        waiting = [expression]
        while waiting:
            one = waiting.pop()
            if len(self._parts[one]) < 2:
                found[one] += 1
            else:
                waiting += self._parts[one]
        return found

    def encoded_from(self, expression: int) -> int:
        """Return what a codec output is the output for."""
        (one,) = self._parts[expression]
        return one

    def within(self, expressions: Iterable[int]) -> set[int]:
        """Return everything that the expressions are made of, themselves included."""
        found: set[int] = set()
        waiting = list(expressions)
        while waiting:
            one = waiting.pop()
            if one not in found:
                found.add(one)
                waiting += self._parts[one]
        return found

    def _number(self, key: tuple[object, ...], mask: int, parts: tuple[int, ...]) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self._masks)
            self._masks.append(mask)
            self._parts.append(parts)
        return self._numbers[key]


class Unit(NamedTuple):
    """The piece of a codec's output that an element belongs to: it can only be decoded as a whole."""

    pieces: tuple[tuple[int, int, int], ...]  # (elements, expression, first origin) of what was encoded
    numel: int
    offset: int  # of the element that the unit is noted at
    encoder: tuple[int, int] | None = None  # (rank, instruction): codecs that round at random give each another output


class Value(NamedTuple):
    """What some consecutive elements of a buffer hold."""

    expression: int
    shift: int  # the value at position p belongs to element p + shift of the data
    writer: int | None = None  # the instruction of the rank that put it there; None for the rank's own data
    unit: Unit | None = None  # in an encoded buffer

    def moved(self, distance: int, writer: int) -> "Value":
        """Return the value after a copy to positions higher by `distance`."""
        return Value(self.expression, self.shift - distance, writer, self.unit)


Piece = tuple[int, int, Value | None]  # (start, stop, value)


class Memory:
    """The buffers of one rank."""

    def __init__(self, program: Program, rank: int, expressions: Expressions) -> None:
        self._buffers: dict[str, SegmentMap[Value | None]] = {
            buffer.name: SegmentMap(buffer.numel, None) for buffer in program.buffers
        }
        self._buffers[DATA] = SegmentMap(program.numel, Value(expressions.own(rank), 0))

    def read(self, touched: Slice) -> list[Piece]:
        """Return what `touched` holds, piece by piece."""
        return self._buffers[touched.buffer].get(touched.start, touched.stop)

    def write(self, touched: Slice, pieces: Iterable[Piece]) -> None:
        """Put pieces, whose positions lie within `touched`, in their places."""
        for start, stop, value in pieces:
            self._buffers[touched.buffer].set(start, stop, value)


def place(pieces: Iterable[Piece], read: Slice, write: Slice, writer: int) -> list[Piece]:
    """Return `pieces` of `read` as they are after a copy to `write`."""
    distance = write.start - read.start
    return [
        (start + distance, stop + distance, value and value.moved(distance, writer)) for start, stop, value in pieces
    ]


V = TypeVar("V")


class SegmentMap(Generic[V]):
    """Maps positions 0 to `numel` to values; cuts segments where it must.

    >>> held = SegmentMap(10, "a")
    >>> held.set(4, 6, "b")
    >>> held.get(3, 10)
    [(3, 4, 'a'), (4, 6, 'b'), (6, 10, 'a')]
    """

    def __init__(self, numel: int, value: V) -> None:
        self._numel = numel
        self._starts = [0]  # segment i runs from _starts[i] to _starts[i + 1] or the end
        self._values = [value]

    def get(self, start: int, stop: int) -> list[tuple[int, int, V]]:
        """Return the segments of `start` to `stop` as (start, stop, value)."""
        found = []
        index = bisect_right(self._starts, start) - 1
        while start < stop:
            end = self._starts[index + 1] if index + 1 < len(self._starts) else self._numel
            found.append((start, min(end, stop), self._values[index]))
            start, index = end, index + 1
        return found

    def set(self, start: int, stop: int, value: V) -> None:
        """Put `value` on all of `start` to `stop`."""
        if start < stop:
            first, last = self._cut(start), self._cut(stop)
            self._starts[first:last] = [start]
            self._values[first:last] = [value]

    def update(self, start: int, stop: int, change: Callable[[V], V]) -> None:
        """Replace each value on `start` to `stop` by `change(value)`."""
        if start < stop:
            for index in range(self._cut(start), self._cut(stop)):
                self._values[index] = change(self._values[index])

    def _cut(self, position: int) -> int:
        """Make a segment start at `position`; return its index (one past the last at the end of the range)."""
        if position >= self._numel:
            return len(self._starts)
        index = bisect_right(self._starts, position) - 1
        if self._starts[index] == position:
            return index
        self._starts.insert(index + 1, position)
        self._values.insert(index + 1, self._values[index])
        return index + 1
