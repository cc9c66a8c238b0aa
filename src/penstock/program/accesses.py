"""`Accesses`: which earlier instructions of a rank the next one must wait for, from the slices they touch.

The builder derives dependencies from it; the proof checks with it that none is missing.
"""

import sys
from dataclasses import dataclass

from penstock.program.segments import SegmentMap


@dataclass(frozen=True, slots=True)
class _Users:
    """Who wrote some elements last, and who has read them since."""

    writer: int | None = None
    readers: tuple[int, ...] = ()


class Accesses:
    """The users of each element of one rank's buffers.

    Only the last writer and the readers since then are kept: whoever waits for these waits for all before them.
    """

    def __init__(self) -> None:
        self._users: dict[str, SegmentMap[_Users]] = {}

    def read(self, buffer: str, start: int, stop: int, index: int) -> set[int]:
        """Note that instruction `index` reads the elements; return those that wrote them."""
        users = self._of(buffer)
        found = {one.writer for _, _, one in users.get(start, stop)}
        users.update(start, stop, lambda one: _Users(one.writer, (*one.readers, index)))
        return {one for one in found if one is not None}

    def write(self, buffer: str, start: int, stop: int, index: int) -> set[int]:
        """Note that instruction `index` writes the elements; return those that read or wrote them."""
        users = self._of(buffer)
        found: set[int] = set()
        for _, _, one in users.get(start, stop):
            if one.readers:  # they waited for the writer themselves
                found.update(one.readers)
            elif one.writer is not None:
                found.add(one.writer)
        users.set(start, stop, _Users(index))
        return found - {index}

    def _of(self, buffer: str) -> SegmentMap[_Users]:
        if buffer not in self._users:
            self._users[buffer] = SegmentMap(sys.maxsize, _Users())
        return self._users[buffer]
