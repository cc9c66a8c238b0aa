"""`SegmentMap`: one value for every position of a range, kept as few segments.

What a rank's memory holds, who wrote it last and who still reads it are all questions about stretches of elements,
not single ones. Both the program builder and the proof ask them.
"""

from bisect import bisect_right
from collections.abc import Callable
from typing import Generic, TypeVar

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
