"""`Accesses`: which earlier instructions of a rank the next one must wait for, from the slices they touch.

The builder derives dependencies from it; the proof checks with it that none is missing.
"""

import sys
from bisect import bisect_right
from collections.abc import Sequence


class Accesses:
    """The users of each element of one rank's buffers.

    Only the last writer and the readers since then are kept: what waits for these waits for all before them.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, _Buffer] = {}

    def read(self, buffer: str, start: int, stop: int, index: int, found: set[int]) -> None:
        """Note that instruction `index` reads the elements; add those that wrote them to `found`."""
        touched = self._buffers.get(buffer) or self._of(buffer)
        one = touched.by_start.get(start)
        if one is not None and one.stop == stop:
            if one.writer >= 0:
                found.add(one.writer)
            one.readers.append(index)
            return
        for one in touched.stretches(start, stop):
            if one.writer >= 0:
                found.add(one.writer)
            one.readers.append(index)

    def write(self, buffer: str, start: int, stop: int, index: int, found: set[int]) -> None:
        """Note that instruction `index` writes the elements; add those that read or wrote them to `found`."""
        touched = self._buffers.get(buffer) or self._of(buffer)
        one = touched.by_start.get(start)
        if one is None or one.stop != stop:
            stretches = touched.stretches(start, stop)
            for each in stretches:
                each.add_users(found)
            if not stretches:
                return
            one = touched.join(start, stop, stretches)
        else:
            one.add_users(found)
        one.writer, one.readers = index, []
        found.discard(index)

    def _of(self, buffer: str) -> "_Buffer":
        if buffer not in self._buffers:
            self._buffers[buffer] = _Buffer()
        return self._buffers[buffer]


class _Stretch:
    """Elements `start` to `stop` of a buffer, which the same instructions use."""

    __slots__ = ("readers", "start", "stop", "writer")

    def __init__(self, start: int, stop: int, writer: int, readers: list[int]) -> None:
        self.start, self.stop = start, stop
        self.writer, self.readers = writer, readers  # what wrote it last, -1 for nothing; what has read it since

    def add_users(self, found: set[int]) -> None:
        """Add what a write must wait for: readers, which have waited for the writer themselves, or else the writer."""
        if self.readers:
            found.update(self.readers)
        elif self.writer >= 0:
            found.add(self.writer)


class _Buffer:
    """The stretches of one buffer, in order and without a gap.

    Most slices are touched again as they are, so that the stretch is found by its start, without a search.
    """

    def __init__(self) -> None:
        whole = _Stretch(0, sys.maxsize, -1, [])
        self.starts = [0]
        self.by_start = {0: whole}

    def stretches(self, start: int, stop: int) -> Sequence[_Stretch]:
        """Return what `start` to `stop` consists of, cut at both ends."""
        if start >= stop:
            return ()
        if start not in self.by_start:
            self._cut(start)
        if stop not in self.by_start:
            self._cut(stop)
        found = [self.by_start[start]]
        while found[-1].stop < stop:
            found.append(self.by_start[found[-1].stop])
        return found

    def join(self, start: int, stop: int, stretches: Sequence[_Stretch]) -> _Stretch:
        """Make one stretch of several."""
        first = stretches[0]
        first.stop = stop
        if len(stretches) > 1:
            for one in stretches[1:]:
                del self.by_start[one.start]
            low = bisect_right(self.starts, start)
            del self.starts[low : low + len(stretches) - 1]
        return first

    def _cut(self, position: int) -> None:
        """Make a stretch begin at `position`."""
        index = bisect_right(self.starts, position)
        left = self.by_start[self.starts[index - 1]]
        self.by_start[position] = _Stretch(position, left.stop, left.writer, left.readers.copy())
        left.stop = position
        self.starts.insert(index, position)
