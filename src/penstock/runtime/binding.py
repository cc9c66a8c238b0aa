"""The slices of a rank's instructions as views of actual memory, and each computation as a call on them.

Three memories: `data`, the scratch of the rank, and the residual, which is aligned with `data` element by element and
holds what codecs could not send. A block that consists of several pieces becomes one call that goes through them.

A block of payloads that vary in size has room for the most its pieces can take. Its payloads stand one behind the other
from its beginning, each at a multiple of 16 bytes, and each says how long it is. So a message carries the beginning of
its block, as far as that is filled; the receive that it meets is as large as the block. Engines that take a message
shorter than its receive say so (`takes_shorter`: gloo, and ranks in one process); over others the whole block travels.
"""

import math
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.codecs.codec import Capabilities, Codec, Decoded, DecodeFrom, Encoded, EncodeInto, Source
from penstock.codecs.feedback import DeferredResidual
from penstock.errors import StrategyError
from penstock.program import DATA, Instruction, Op, Part, Slice
from penstock.runtime.layout import PAYLOAD_ALIGNMENT, Layout
from penstock.runtime.reduce import bits, merge_kernel
from penstock.runtime.transport import Array, Bytes, Work
from penstock.runtime.views import storage_dtype
from penstock.strategies.batches import Piece

Compute = Callable[..., Any]
Call = tuple[Compute, tuple[Any, ...]]  # a function and its arguments
Residual = npt.NDArray[np.float32]
Positions = Mapping[int, frozenset[int]]  # by the index of an instruction: positions of `data`


@dataclass(frozen=True, slots=True)
class Memories:
    """What a rank's instructions work on."""

    data: Bytes
    scratch: Bytes
    residual: Residual | None = None
    deferred: DeferredResidual | None = None  # instead of `residual`, for a codec that defers the subtraction
    scale: float = 1.0  # what `data` is multiplied by first
    sources: "Sources | None" = None  # where what `data` stands for is


@dataclass(slots=True, eq=False)
class Sources:
    """Where a framework has the tensors that `data` stands for: each is read there when it is first touched."""

    bounds: tuple[int, ...]  # of the tensors in `data`
    arrays: Sequence[Array]  # each flat; others in every run

    def place(self, piece: Piece) -> tuple[int, int]:
        """Return the tensor of a piece, and where that begins."""
        number = bisect(self.bounds, piece[0]) - 1
        return number, self.bounds[number]

    def holds(self, piece: Piece) -> bool:
        """Say whether a piece is of one tensor."""
        return piece[1] <= self.bounds[self.place(piece)[0] + 1]

    def of(self, piece: Piece) -> Source:
        """Return what returns a piece of this run's arrays."""
        number, low = self.place(piece)
        part = slice(piece[0] - low, piece[1] - low)
        return lambda: self.arrays[number][part]


@dataclass(slots=True)
class Binding:
    """A rank's instructions on actual memory; each list has one entry per instruction."""

    addresses: tuple[float, ...]  # of the memories it was made for, the generation of a deferred residual, the scale
    messages: list[Bytes | None]  # what a send or receive moves
    computations: list[Call | None]
    natives: list[Array | None]  # what the engine's own collective works on
    works: list[Work | None]  # of the run in progress
    sizes: list[Call | None] | None = None  # how much of a message to send, where that differs from run to run
    sources: Sources | None = None  # whose arrays are to be those of the run


@dataclass(frozen=True, slots=True)
class Scaling:
    """Which instructions multiply which positions of `data`, and which add to some that are not multiplied yet.

    The data of a call are multiplied by its scale where an instruction reads them anyway, usually at their first touch.
    Where that adds a decoded block, to be encoded later, as in a ring, they can wait for the encode, which multiplies
    in its own pass: until then what is added is divided instead, in the pass that decodes it.

        scale (data + decoded / scale) = scale data + decoded

    With a scale that is a power of two, as 1 / 4, both sides are the same to the bit, and only then is that done.
    """

    at: Positions = field(default_factory=dict)
    before: Positions = field(default_factory=dict)


class Binder:
    """Makes bindings of one rank's instructions."""

    def __init__(self, part: Part, dtype: str, layout: Layout, codec: Codec | None) -> None:
        self.instructions, self.dtype, self.layout = part.instructions, dtype, layout
        self.encoded = {buffer.name for buffer in part.buffers if buffer.encoded}
        self.codec = codec
        self.can = Capabilities() if codec is None else codec.capabilities
        self.merge = merge_kernel(dtype)
        self._check_codec(part.strategy)

    def bind(self, addresses: tuple[float, ...], memories: Memories) -> Binding:
        """Return the instructions on this memory."""
        messages = [self._message(instruction, memories) for instruction in self.instructions]
        scaling = self._scaling(memories)
        computations = [
            self._computation(
                instruction,
                memories,
                scaling.at.get(index, ()),
                scaling.before.get(index, ()),
                self._at_first_touch.at.get(index, ()) if memories.sources is not None else (),
            )
            for index, instruction in enumerate(self.instructions)
        ]
        natives = [self._native(instruction, memories) for instruction in self.instructions]
        sizes = [self._size(one, memories) for one in self.instructions] if self.can.variable_size else None
        works: list[Work | None] = [None] * len(self.instructions)
        return Binding(addresses, messages, computations, natives, works, sizes, memories.sources)

    def reads(self, sources: Sources, memories: Memories) -> bool:
        """Say whether the program can read `data` where its tensors are: each piece of it when it is first touched."""
        able = self.can.reads_sources and memories.deferred is not None and not self.can.variable_size
        if not able or self.layout.batches is None or not (memories.scale == 1.0 or is_power_of_two(memories.scale)):
            return False
        if not all(self._is_read_once(indices) for indices in _touches(self.instructions).values()):
            return False
        first = self._at_first_touch.at.values()
        return all(sources.holds(piece) for positions in first for piece in self._pieces_at(positions))

    def _is_read_once(self, indices: Sequence[int]) -> bool:
        """Say whether the first of the instructions that touch a position encodes it, or adds what arrived to it.

        What is encoded first must be written by the next of them: nothing is there yet.
        """
        first, *others = (self.instructions[index] for index in indices)
        if first.op is Op.ENCODE:
            return not others or others[0].op is Op.DECODE
        return first.op is Op.MERGE and self._is_encoded(first.read) and not self._is_encoded(first.write)

    @cached_property
    def only_receives(self) -> bool:
        """Whether this rank encodes and decodes nothing, though others do: what they decoded is sent to it."""
        codes = (self._is_encoded(slice_) for one in self.instructions for slice_ in (one.read, one.write))
        return self.layout.batches is not None and not any(codes)

    def _size(self, instruction: Instruction, memories: Memories) -> Call | None:
        """Return what says how much of a message is filled: all but the end of its last block."""
        sent = instruction.read
        if instruction.op is not Op.SEND or not self._is_encoded(sent):
            return None
        assert sent is not None
        *before, (last, pieces) = self._blocks(sent)
        skipped = sum(self._bytes(block, memories).size for block, _ in before)
        assert self.codec is not None
        return _filled_nbytes, (self.codec.payload_nbytes, len(pieces), self._bytes(last, memories), skipped)

    def _blocks(self, slice_: Slice) -> list[tuple[Slice, Sequence[Piece]]]:
        """Return the blocks of an encoded slice, each with its pieces."""
        if self.layout.batches is None:
            return [(slice_, self.layout.pieces(slice_))]
        blocks = [Slice(slice_.buffer, place, place + 1) for place in range(slice_.start, slice_.stop)]
        return [(block, self.layout.pieces(block)) for block in blocks]

    def _check_codec(self, strategy: str) -> None:
        """Refuse what would fail in the middle of a run, when messages are under way."""
        if self.can.merging:
            return
        merge = Op.MERGE
        if any(one[0] is merge and self._is_encoded(one.write) for one in self.instructions):
            name = self.codec.name if self.codec else None
            raise StrategyError(f"{strategy}: adds encoded blocks, which {name} cannot; use a sparse codec")

    def _message(self, instruction: Instruction, memories: Memories) -> Bytes | None:
        if instruction.op is Op.SEND:
            return self._bytes(instruction.read, memories)
        return self._bytes(instruction.write, memories) if instruction.op is Op.RECV else None

    def _native(self, instruction: Instruction, memories: Memories) -> Array | None:
        return self._elements(instruction.write, memories) if instruction.op is Op.NATIVE else None

    @cached_property
    def scales_ahead(self) -> bool:
        """Whether `data` must be multiplied as a whole before the first action: some of it is sent as it is."""
        if self.layout.batches is None:
            return True
        first = [self.instructions[index] for index in self._at_first_touch.at]
        return any(not (self._is_encoded(one.read) or self._is_encoded(one.write)) for one in first)

    @cached_property
    def _at_first_touch(self) -> Scaling:
        return at_first_touch(self.instructions)

    def _scaling(self, memories: Memories) -> Scaling:
        """Return when `data` are multiplied: encodes do it in their own pass where feedback may be put off."""
        if memories.scale == 1.0:
            return Scaling()
        able = memories.deferred is not None and self.can.scaled_add and not self.can.variable_size
        return at_encodes(self.instructions) if able and is_power_of_two(memories.scale) else self._at_first_touch

    def _computation(
        self,
        instruction: Instruction,
        memories: Memories,
        fresh: Collection[int],
        waiting: Collection[int],
        elsewhere: Collection[int],
    ) -> Call | None:
        """Return function and operands in the order the function takes them.

        `fresh` positions are multiplied by the scale first, `waiting` ones later; those `elsewhere` are read there.
        """
        write, read = instruction.write, instruction.read
        if instruction.op is Op.COPY:
            return np.copyto, (self._bytes(write, memories), self._bytes(read, memories))
        if instruction.op is Op.MERGE and not self._is_encoded(read):
            out, other = (bits(self._elements(slice_, memories), self.dtype) for slice_ in (write, read))
            return self.merge, (out, other)
        if instruction.op not in (Op.MERGE, Op.ENCODE, Op.DECODE):
            return None
        calls = list(self._codec_calls(instruction, memories, fresh, waiting, elsewhere))
        return calls[0] if len(calls) == 1 else (_call_each, (calls,))

    def _codec_calls(
        self,
        instruction: Instruction,
        memories: Memories,
        fresh: Collection[int],
        waiting: Collection[int],
        elsewhere: Collection[int],
    ) -> Iterator[Call]:
        """Yield calls that encode or decode the pieces of a block, after those that multiply what is still to be."""
        write, read, codec = instruction.write, instruction.read, self.codec
        assert codec is not None  # `lay_out` refused encoded buffers without one
        assert write is not None
        assert read is not None
        coded, other = (write, read) if self._is_encoded(write) else (read, write)
        pieces = self.layout.pieces(coded)
        payloads = self._payloads(coded, pieces, memories)
        if instruction.op is Op.MERGE and self._is_encoded(write):
            for piece, out, arrived in zip(pieces, payloads, self._payloads(read, pieces, memories), strict=True):
                yield codec.merge, (arrived, out, self._memory_of(piece, memories) if instruction.keeps else None)
            return
        if self.can.variable_size:
            yield from self._packed_calls(codec, instruction, coded, other, memories, fresh)
            return
        unscaled, late, far = self._pieces_at(fresh), self._pieces_at(waiting), self._pieces_at(elsewhere)
        encodes, decodes = list[Encoded](), list[Decoded]()
        for piece, payload, values in zip(pieces, payloads, self._values(other, pieces, memories), strict=True):
            scales = piece in unscaled
            if scales and not (instruction.op is Op.ENCODE and memories.deferred is not None):
                yield np.multiply, (values, np.float32(memories.scale), values)
            source = memories.sources.of(piece) if memories.sources is not None and piece in far else None
            if instruction.op is Op.ENCODE:
                encodes.append(Encoded(values, self._residual(piece, memories, scales), payload, source))
            else:
                decodes.append(Decoded(payload, values, 1 / memories.scale if piece in late else 1.0, source))
        if encodes:
            yield codec.bind_encodes(encodes), ()
        for _, group in groupby(decodes, key=lambda each: each.source is None):
            yield codec.bind_decodes(list(group), instruction.op is Op.MERGE), ()

    def _pieces_at(self, positions: Collection[int]) -> set[Piece]:
        return {piece for position in positions for piece in self.layout.pieces(Slice(DATA, position, position + 1))}

    def _packed_calls(
        self,
        codec: Codec,
        instruction: Instruction,
        coded: Slice,
        other: Slice,
        memories: Memories,
        fresh: Collection[int],
    ) -> Iterator[Call]:
        """Yield one call for each block of a codec whose payloads differ in size."""
        for block, pieces in self._blocks(coded):
            values = list(self._values(other, pieces, memories))
            if block.start in fresh:
                yield from ((np.multiply, (each, np.float32(memories.scale), each)) for each in values)
            if instruction.op is Op.ENCODE:
                residuals = [self._residual(piece, memories) for piece in pieces]
                calls = [codec.bind_encode_into(*each) for each in zip(values, residuals, strict=True)]
            else:
                calls = [codec.bind_decode_from(each, instruction.op is Op.MERGE) for each in values]
            yield _call_packed, (calls, self._bytes(block, memories))

    def _payloads(self, slice_: Slice, pieces: Sequence[Piece], memories: Memories) -> Iterator[Bytes]:
        start = self.layout.place(slice_).start
        for piece in pieces:
            nbytes = self.layout.payload_nbytes(piece)
            yield memories.scratch[start : start + nbytes]
            start += -(-nbytes // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT

    def _values(self, slice_: Slice, pieces: Sequence[Piece], memories: Memories) -> Iterator[Array]:
        """Yield the elements of pieces; those of a batch lie in `data` wherever their tensors do."""
        if self.layout.batches is None:
            yield self._elements(slice_, memories)
            return
        assert slice_.buffer == DATA, f"{slice_} is encoded or decoded; batches are pieces of {DATA}"
        whole = memories.data.view(storage_dtype(self.dtype))
        for start, stop in pieces:
            yield whole[start:stop]

    def _residual(self, piece: Piece, memories: Memories, scales: bool = False) -> Any:
        if memories.deferred is not None:
            return memories.deferred.piece(*piece, memories.scale if scales else 1.0)
        return None if memories.residual is None else memories.residual[piece[0] : piece[1]]

    def _memory_of(self, piece: Piece, memories: Memories) -> Residual | None:
        """Return the residual of a piece as memory: codecs that merge put nothing off."""
        residual = memories.residual if memories.deferred is None else memories.deferred.memory
        return None if residual is None else residual[piece[0] : piece[1]]

    def _is_encoded(self, slice_: Slice | None) -> bool:
        return slice_ is not None and slice_.buffer in self.encoded

    def _elements(self, slice_: Slice | None, memories: Memories) -> Array:
        return self._bytes(slice_, memories).view(storage_dtype(self.dtype))

    def _bytes(self, slice_: Slice | None, memories: Memories) -> Bytes:
        assert slice_ is not None
        place = self.layout.place(slice_)
        return (memories.data if place.in_data else memories.scratch)[place.start : place.stop]


def copy_sources(values: Array, sources: Sequence[Array]) -> None:
    """Copy flat arrays to where they belong, one after the other."""
    for each, (start, stop) in zip(
        sources, pairwise(accumulate((each.size for each in sources), initial=0)), strict=True
    ):
        np.copyto(values[start:stop], each)


def _call_packed(calls: Sequence[EncodeInto | DecodeFrom], block: Bytes) -> None:
    """Encode or decode payloads that stand one behind the other in a block."""
    place = 0
    for call in calls:
        place += -(-call(block[place:]) // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT


def _filled_nbytes(payload_nbytes: Callable[[Bytes], int], count: int, block: Bytes, before: int) -> int:
    """Return how far a message is filled whose last block has `count` payloads, encoded here or arrived."""
    place = 0
    for _ in range(count):
        place += -(-payload_nbytes(block[place:]) // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT
    return before + min(place, block.size)


def _call_each(calls: Sequence[Call]) -> None:
    """Go through the pieces of a batch: one action of the executor for all of them."""
    for function, operands in calls:
        function(*operands)


def at_first_touch(instructions: Sequence[Instruction]) -> Scaling:
    """Multiply every position where it is read or written first."""
    touches = _touches(instructions)
    return Scaling(_by_instruction([(indices[0], position) for position, indices in touches.items()]))


def at_encodes(instructions: Sequence[Instruction]) -> Scaling:
    """Let positions that are only added to before they are encoded wait for that; all others as at first touch."""
    at, before = [], []
    for position, indices in _touches(instructions).items():
        adds = _leading_adds(instructions, indices)
        at.append((indices[len(adds)], position))
        before += [(index, position) for index in adds]
    return Scaling(_by_instruction(at), _by_instruction(before))


def is_power_of_two(scale: float) -> bool:
    """Say whether multiplying and dividing by a scale rounds nothing.

    >>> [is_power_of_two(scale) for scale in (1 / 4, 1 / 3, 8.0)]
    [True, False, True]
    """
    return math.frexp(scale)[0] == 0.5


def _leading_adds(instructions: Sequence[Instruction], indices: Sequence[int]) -> list[int]:
    """Return the additions to a position before its only encode, where nothing else comes before that."""
    ops = [instructions[index].op for index in indices]
    if ops.count(Op.ENCODE) != 1:
        return []
    encode = ops.index(Op.ENCODE)
    waits = all(op is Op.MERGE for op in ops[:encode]) and all(op is Op.DECODE for op in ops[encode + 1 :])
    return list(indices[:encode]) if waits else []


def _touches(instructions: Sequence[Instruction]) -> dict[int, list[int]]:
    """Return, by position of `data`, the indices of the instructions that read or write it."""
    found = defaultdict(list)
    for index, one in enumerate(instructions):
        slices = [each for each in (one.read, one.write) if each is not None and each.buffer == DATA]
        for position in sorted({place for each in slices for place in range(each.start, each.stop)}):
            found[position].append(index)
    return found


def _by_instruction(pairs: Sequence[tuple[int, int]]) -> Positions:
    found = defaultdict(set)
    for index, position in pairs:
        found[index].add(position)
    return {index: frozenset(positions) for index, positions in found.items()}
