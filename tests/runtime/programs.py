"""Hand-made programs, so that the runtime's tests do not lean on the strategies they will run."""

import numpy as np

from penstock.codecs.codec import Codec
from penstock.program import DATA, Collective, Program, Slice
from penstock.program.builder import ProgramBuilder


def data(start: int, stop: int) -> Slice:
    return Slice(DATA, start, stop)


def exchange(numel: int) -> Program:
    """All-reduce of two ranks: each sends all it has."""
    builder = ProgramBuilder("exchange", Collective.ALL_REDUCE, 2, numel)
    builder.scratch("other", numel)
    other = Slice("other", 0, numel)
    for rank in range(2):
        builder.message(rank, 1 - rank, data(0, numel), other)
    for rank in range(2):
        builder.merge(rank, data(0, numel), other)
    return builder.build()


def bounds(numel: int, parts: int) -> list[tuple[int, int]]:
    return [(numel * part // parts, numel * (part + 1) // parts) for part in range(parts)]


def ring(world_size: int, numel: int) -> Program:
    """All-reduce in 2 (world_size - 1) steps of one chunk each."""
    builder = ProgramBuilder("hand-made ring", Collective.ALL_REDUCE, world_size, numel)
    builder.scratch("incoming", numel)
    chunks = [data(*pair) for pair in bounds(numel, world_size)]
    for step in range(2 * (world_size - 1)):
        reducing = step < world_size - 1
        for rank in range(world_size):
            chunk = chunks[(rank - step) % world_size]
            place = Slice("incoming", chunk.start, chunk.stop) if reducing else chunk
            builder.message(rank, (rank + 1) % world_size, chunk, place)
        for rank in range(world_size if reducing else 0):
            chunk = chunks[(rank - 1 - step) % world_size]
            builder.merge(rank, chunk, Slice("incoming", chunk.start, chunk.stop))
    return builder.build()


def chain(world_size: int, numel: int, blocks: int) -> Program:
    """Broadcast from rank 0 down a chain, in blocks."""
    builder = ProgramBuilder("hand-made chain", Collective.BROADCAST, world_size, numel)
    for pair in bounds(numel, blocks):
        for rank in range(world_size - 1):
            builder.message(rank, rank + 1, data(*pair), data(*pair))
    return builder.build()


def coded_exchange(numel: int) -> Program:
    """All-reduce of two ranks through a codec; both decode both messages, so both hold the same bits."""
    builder = ProgramBuilder("coded exchange", Collective.ALL_REDUCE, 2, numel)
    for name in ("mine", "other"):
        builder.scratch(name, numel, encoded=True)
    mine, other = Slice("mine", 0, numel), Slice("other", 0, numel)
    for rank in range(2):
        builder.encode(rank, mine, data(0, numel))
        builder.decode(rank, data(0, numel), mine)
    for rank in range(2):
        builder.message(rank, 1 - rank, mine, other)
    for rank in range(2):
        builder.merge(rank, data(0, numel), other)
    return builder.build()


class Halves(Codec):
    """A toy codec: float32 as float16, with a byte count in front to make sizes odd."""

    name = "halves"

    def max_nbytes(self, numel: int) -> int:
        return 1 + 2 * numel

    def encode(self, read: np.ndarray, residual: np.ndarray | None, out: np.ndarray) -> int:
        values = read if residual is None else read + residual
        out[0] = 42
        out[1:] = values.astype(np.float16).view(np.uint8)
        if residual is not None:
            residual[:] = values - values.astype(np.float16).astype(np.float32)
        return out.size

    def decode(self, read: np.ndarray, out: np.ndarray) -> None:
        assert read[0] == 42
        out[:] = read[1:].copy().view(np.float16)

    def decode_add(self, read: np.ndarray, out: np.ndarray) -> None:
        assert read[0] == 42
        out += read[1:].copy().view(np.float16)
