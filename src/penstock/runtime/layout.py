"""Where the scratch buffers of a rank lie in one piece of memory, and where a slice lies in its buffer.

Plain buffers hold elements. An encoded buffer holds what a codec makes of elements, whose size only the codec
knows: each block of it that the rank encodes or decodes gets a place of its own, as large as the codec can need. So
blocks must be equal or disjoint: half an encoded block means nothing. Places follow one another as blocks do, so that
one message can carry several.

In a program that counts batches (`strategies.batches`) a position is a batch, and a block consists of the payloads of
all pieces in its batches, one after the other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from penstock.errors import StrategyError
from penstock.program import DATA, Buffer, Instruction, Op, Part, Slice
from penstock.strategies.batches import Batches, Piece

ALIGNMENT = 64  # bytes: a cache line, so that no two slices share one and every element type is aligned
PAYLOAD_ALIGNMENT = 16  # bytes: what a codec may rely on
_SEND, _RECV = Op.SEND, Op.RECV  # as in the builder
_CODES = (Op.ENCODE, Op.DECODE, Op.MERGE)


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
    max_nbytes: Callable[[int], int] | None = None  # how many bytes so many elements can need encoded
    batches: Batches | None = None  # what positions stand for; elements where there are none
    nbytes: int = 0  # of the scratch memory
    plain: dict[str, int] = field(default_factory=dict)  # buffer -> its first byte
    encoded: dict[str, dict[int, int]] = field(default_factory=dict)  # buffer -> edge of a block -> byte
    padded: dict[int, int] = field(
        default_factory=dict
    )  # elements of a piece -> bytes of its payload, padding included

    def place(self, slice_: Slice) -> Place:
        """Return where a slice lies."""
        if slice_.buffer in self.encoded:
            edges = self.encoded[slice_.buffer]
            return Place(False, edges[slice_.start], edges[slice_.stop])
        base = 0 if slice_.buffer == DATA else self.plain[slice_.buffer]
        start, stop = (base + self.element(position) * self.itemsize for position in (slice_.start, slice_.stop))
        return Place(slice_.buffer == DATA, start, stop)

    def element(self, position: int) -> int:
        """Return the element at which a position of a plain buffer begins."""
        if self.batches is None:
            return position
        ends = {0: 0, len(self.batches.pieces): self.batches.numel}
        if position not in ends:
            raise StrategyError("dense data in a compressed program moves as a whole: batches lie anywhere in it")
        return ends[position]

    def pieces(self, slice_: Slice) -> Sequence[Piece]:
        """Return what is encoded by itself within a block: (start, stop) of `data`."""
        if self.batches is None:
            return [(slice_.start, slice_.stop)]
        if slice_.stop == slice_.start + 1:
            return self.batches.pieces[slice_.start]
        return [piece for batch in self.batches.pieces[slice_.start : slice_.stop] for piece in batch]

    def payload_nbytes(self, piece: Piece) -> int:
        """Return the bytes that the payload of a piece can take."""
        assert self.max_nbytes is not None
        return self.max_nbytes(piece[1] - piece[0])

    def block_nbytes(self, slice_: Slice) -> int:
        """Return the bytes that a block takes, padding included."""
        total = 0
        for start, stop in self.pieces(slice_):
            nbytes = self.padded.get(stop - start)
            if nbytes is None:
                nbytes = self.padded[stop - start] = _aligned(self.payload_nbytes((start, stop)), PAYLOAD_ALIGNMENT)
            total += nbytes
        return total

    def buffers(self) -> dict[str, tuple[int, int]]:
        """Return the first byte of each buffer that has any, and the one behind its last."""
        starts = self.plain | {name: min(edges.values()) for name, edges in self.encoded.items() if edges}
        ordered = sorted(starts, key=lambda name: starts[name])
        stops = [*(starts[name] for name in ordered[1:]), self.nbytes]
        return {name: (starts[name], stop) for name, stop in zip(ordered, stops, strict=False)}

    def reserve(self, nbytes: int) -> int:
        """Return the first byte of a new aligned place for `nbytes`."""
        start = self.nbytes
        self.nbytes += _aligned(nbytes, ALIGNMENT)
        return start


def lay_out(
    part: Part,
    itemsize: int,
    max_nbytes: Callable[[int], int] | None = None,
    batches: Batches | None = None,
) -> Layout:
    """Place the scratch that a rank uses; `max_nbytes` is how many bytes so many elements can need encoded."""
    layout = Layout(itemsize, max_nbytes, batches)
    buffers = {DATA: Buffer(DATA, part.numel)} | {buffer.name: buffer for buffer in part.buffers}
    for name, slices in _used(part.instructions).items():
        buffer = buffers[name]
        numel = buffer.numel
        for slice_ in slices:
            if not 0 <= slice_[1] <= slice_[2] <= numel:
                raise StrategyError(
                    f"{part.strategy}: rank {part.rank} uses {slice_}; the buffer has {buffer.numel} elements"
                )
        if buffer.encoded:
            if max_nbytes is None:
                raise StrategyError(f"{part.strategy}: buffer {name!r} is encoded; pass the codec that encodes it")
            layout.encoded[name] = _place_blocks(layout, _blocks(slices, part.strategy, batches is not None))
        elif name != DATA:
            layout.plain[name] = layout.reserve(layout.element(buffer.numel) * itemsize)
    return layout


def _used(instructions: Sequence[Instruction]) -> dict[str, dict[Slice, bool]]:
    """Return the slices of each buffer, in the order of first use: whether each is encoded or decoded as a whole."""
    found: dict[str, dict[Slice, bool]] = {}
    for op, write, read, _, _, _ in instructions:
        codes = op is not _SEND and op is not _RECV and op in _CODES
        for slice_ in (write, read):
            if slice_ is not None:
                slices = found.get(slice_[0])
                if slices is None:
                    slices = found[slice_[0]] = {}
                if codes:
                    slices[slice_] = True
                elif slice_ not in slices:
                    slices[slice_] = False
    return found


def _blocks(slices: Mapping[Slice, bool], strategy: str, batched: bool) -> list[Slice]:
    """Return the blocks of an encoded buffer in order: what is coded as a whole, or else passed on as a whole."""
    if batched:  # a block may consist of several batches, and be sent in several parts
        buffer = next(iter(slices)).buffer
        positions: set[int] = set()
        for _, start, stop in slices:
            if stop == start + 1:
                positions.add(start)
            else:
                positions.update(range(start, stop))
        return [Slice(buffer, position, position + 1) for position in sorted(positions)]
    found = {one for one, coded in slices.items() if coded}
    found |= {one for one in slices if not any(one.overlaps(other) for other in found)}
    blocks = sorted(found, key=lambda one: (one.start, -one.stop))
    for one, other in pairwise(blocks):
        if one.overlaps(other):
            raise StrategyError(f"{strategy}: encoded {other} overlaps {one}; they must be equal or disjoint")
    return blocks


def _place_blocks(layout: Layout, blocks: Sequence[Slice]) -> dict[int, int]:
    """Return the byte of each edge of a block; blocks follow one another without gaps."""
    sizes = [layout.block_nbytes(block) for block in blocks]
    byte = layout.reserve(sum(sizes))
    edges: dict[int, int] = {}
    for block, nbytes in zip(blocks, sizes, strict=True):
        edges[block.start] = byte
        byte += nbytes
        edges[block.stop] = byte
    return edges


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
