"""The slices of a rank's instructions as views of actual memory, and each computation as a call on two of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.program import Instruction, Op, Program, Slice
from penstock.runtime.codec import Codec
from penstock.runtime.dtypes import storage_dtype
from penstock.runtime.layout import Layout
from penstock.runtime.reduce import bits, merge_kernel
from penstock.runtime.transport import Array, Bytes, Work

Compute = Callable[[Array, Array], Any]


@dataclass(slots=True)
class Binding:
    """A rank's instructions on actual memory; each list has one entry per instruction."""

    addresses: tuple[int, int]  # of the data and of the scratch memory it was made for
    messages: list[Bytes | None]  # what a send or receive moves
    computations: list[tuple[Compute, Array, Array] | None]  # function, and what it is called on
    natives: list[Array | None]  # what the engine's own collective works on
    works: list[Work | None]  # of the run in progress


class Binder:
    """Makes bindings of one rank's instructions."""

    def __init__(self, program: Program, rank: int, dtype: str, layout: Layout, codec: Codec | None) -> None:
        self.instructions, self.dtype, self.layout = program.ranks[rank], dtype, layout
        self.encoded = {buffer.name for buffer in program.buffers if buffer.encoded}
        self.codec = codec
        self.merge = merge_kernel(dtype)

    def bind(self, addresses: tuple[int, int], data: Bytes, scratch: Bytes) -> Binding:
        """Return the instructions on this memory."""
        memories = (scratch, data)
        messages = [self._message(instruction, memories) for instruction in self.instructions]
        computations = [self._computation(instruction, memories) for instruction in self.instructions]
        natives = [self._native(instruction, memories) for instruction in self.instructions]
        return Binding(addresses, messages, computations, natives, [None] * len(self.instructions))

    def _message(self, instruction: Instruction, memories: tuple[Bytes, Bytes]) -> Bytes | None:
        if instruction.op is Op.SEND:
            return self._bytes(instruction.read, memories)
        return self._bytes(instruction.write, memories) if instruction.op is Op.RECV else None

    def _native(self, instruction: Instruction, memories: tuple[Bytes, Bytes]) -> Array | None:
        return self._elements(instruction.write, memories) if instruction.op is Op.NATIVE else None

    def _computation(
        self, instruction: Instruction, memories: tuple[Bytes, Bytes]
    ) -> tuple[Compute, Array, Array] | None:
        """Return function and operands in the order the function takes them."""
        write, read, codec = instruction.write, instruction.read, self.codec
        if instruction.op is Op.COPY:
            return np.copyto, self._bytes(write, memories), self._bytes(read, memories)
        if instruction.op is Op.MERGE and read is not None and read.buffer not in self.encoded:
            out, other = (bits(self._elements(slice_, memories), self.dtype) for slice_ in (write, read))
            return self.merge, out, other
        if instruction.op not in (Op.MERGE, Op.ENCODE, Op.DECODE):
            return None
        assert codec is not None  # `lay_out` refused encoded buffers without one
        if instruction.op is Op.ENCODE:
            return codec.encode, self._elements(read, memories), self._bytes(write, memories)
        function = codec.decode if instruction.op is Op.DECODE else codec.decode_add
        return function, self._bytes(read, memories), self._elements(write, memories)

    def _elements(self, slice_: Slice | None, memories: tuple[Bytes, Bytes]) -> Array:
        return self._bytes(slice_, memories).view(storage_dtype(self.dtype))

    def _bytes(self, slice_: Slice | None, memories: tuple[Bytes, Bytes]) -> Bytes:
        assert slice_ is not None
        place = self.layout.place(slice_)
        return memories[place.in_data][place.start : place.stop]
