"""`Accesses`: which earlier instructions of a rank the next one must wait for, from the slices they touch.

The builder derives dependencies from it; the proof checks with it that none is missing.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence


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
            one = stretches[0] if len(stretches) == 1 else touched.join(stop, stretches)
            one.readers.clear()
        elif one.readers:  # as `add_users`, without a call
            found.update(one.readers)
            one.readers.clear()
        elif one.writer >= 0:
            found.add(one.writer)
        one.writer = index
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
    """The stretches of one buffer that were touched, in order.

    Most slices are touched again as they are, so that the stretch is found by its start, without a search. Most others
    are touched for the first time and overlap none: they become a stretch as they are.
    """

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.by_start: dict[int, _Stretch] = {}

    def stretches(self, start: int, stop: int) -> Sequence[_Stretch]:
        """Return what `start` to `stop` consists of, cut at both ends."""
        if start >= stop:
            return ()
        starts = self.starts
        place = bisect_right(starts, start)  # of the first that begins after `start`
        if (place == len(starts) or stop <= starts[place]) and (
            not place or self.by_start[starts[place - 1]].stop <= start
        ):
            return (self._insert(place, start, stop),)
        self._cut(start)
        self._cut(stop)
        return list(self._filled(start, stop))

    def join(self, stop: int, stretches: Sequence[_Stretch]) -> _Stretch:
        """Make one stretch of several that follow one another."""
        first = stretches[0]
        first.stop = stop
        for one in stretches[1:]:
            del self.by_start[one.start]
        low = bisect_right(self.starts, first.start)
        del self.starts[low : low + len(stretches) - 1]
        return first

    def _insert(self, place: int, start: int, stop: int) -> _Stretch:
        self.starts.insert(place, start)
        made = self.by_start[start] = _Stretch(start, stop, -1, [])
        return made

    def _filled(self, start: int, stop: int) -> Iterator[_Stretch]:
        """Yield the stretches from `start` to `stop`; what was not touched between them becomes one."""
        while start < stop:
            one = self.by_start.get(start)
            if one is None:
                place = bisect_right(self.starts, start)
                after = self.starts[place] if place < len(self.starts) else stop
                one = self._insert(place, start, min(after, stop))
            yield one
            start = one.stop

    def _cut(self, position: int) -> None:
        """Cut the stretch around `position` in two, if there is one."""
        place = bisect_right(self.starts, position)
        left = self.by_start[self.starts[place - 1]] if place else None
        if left is not None and left.start < position < left.stop:
            self.starts.insert(place, position)
            self.by_start[position] = _Stretch(position, left.stop, left.writer, left.readers.copy())
            left.stop = position
