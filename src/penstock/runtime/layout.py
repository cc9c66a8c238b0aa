"""Where the scratch buffers of a rank lie in one piece of memory, and where a slice lies in its buffer.

Plain buffers hold elements. An encoded buffer holds what a codec makes of elements, whose size only the codec
knows: each slice of it that the rank uses gets a place of its own, as large as the codec can need. So slices of an
encoded buffer must be equal or disjoint: half an encoded block means nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.errors import StrategyError
from penstock.program import DATA, Instruction, Program, Slice

ALIGNMENT = 64  # bytes: a cache line, so that no two slices share one and every element type is aligned


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes `start` to `stop` of `data` or of the scratch memory."""

    in_data: bool
    start: int
    stop: int


@dataclass(slots=True)
class Layout:
    """The places of one rank's slices."""

    itemsize: int  # bytes per element
    nbytes: int = 0  # of the scratch memory
    plain: dict[str, int] = field(default_factory=dict)  # buffer -> its first byte
    encoded: dict[Slice, Place] = field(default_factory=dict)

    def place(self, slice_: Slice) -> Place:
        """Return where a slice lies."""
        if slice_ in self.encoded:
            return self.encoded[slice_]
        base = 0 if slice_.buffer == DATA else self.plain[slice_.buffer]
        start, stop = base + slice_.start * self.itemsize, base + slice_.stop * self.itemsize
        return Place(slice_.buffer == DATA, start, stop)

    def reserve(self, nbytes: int) -> int:
        """Return the first byte of a new aligned place for `nbytes`."""
        start = self.nbytes
        self.nbytes += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return start


def lay_out(program: Program, rank: int, itemsize: int, encoded_nbytes: Callable[[int], int] | None = None) -> Layout:
    """Place the scratch that `rank` uses; `encoded_nbytes` is how many bytes so many elements can need encoded."""
    layout = Layout(itemsize)
    for slice_ in _used(program.ranks[rank]):
        buffer = program.buffer(slice_.buffer)
        if not 0 <= slice_.start <= slice_.stop <= buffer.numel:
            raise StrategyError(
                f"{program.strategy}: rank {rank} uses {slice_}; the buffer has {buffer.numel} elements"
            )
        if buffer.encoded:
            _place_encoded(layout, slice_, program.strategy, encoded_nbytes)
        elif slice_.buffer != DATA and slice_.buffer not in layout.plain:
            layout.plain[slice_.buffer] = layout.reserve(buffer.numel * itemsize)
    return layout


def _place_encoded(layout: Layout, slice_: Slice, strategy: str, encoded_nbytes: Callable[[int], int] | None) -> None:
    if slice_ in layout.encoded:
        return
    if encoded_nbytes is None:
        raise StrategyError(f"{strategy}: buffer {slice_.buffer!r} is encoded; pass the codec that encodes it")
    for other in layout.encoded:
        if other.overlaps(slice_):
            raise StrategyError(f"{strategy}: encoded {slice_} overlaps {other}; they must be equal or disjoint")
    nbytes = encoded_nbytes(slice_.numel)
    start = layout.reserve(nbytes)
    layout.encoded[slice_] = Place(False, start, start + nbytes)


def _used(instructions: Sequence[Instruction]) -> Iterator[Slice]:
    for instruction in instructions:
        yield from (slice_ for slice_ in (instruction.write, instruction.read) if slice_ is not None)
