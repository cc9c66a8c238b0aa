"""A `Program`: what every rank does to carry out one collective, as plain data.

Each rank has a list of instructions over slices of named buffers. `data` is the user's tensor; other buffers are
scratch. Positions are elements, not bytes: no message may cut an element in two, and the same program serves every
element type. Instructions of one rank are issued in list order; `after` names the earlier instructions of the same
rank that must be finished first. Sends and receives are asynchronous, and the k-th message from one rank to another
is received by the k-th receive from it: every engine keeps that order.

A `Part` is one rank's share of a program, and all that this rank needs of it. Strategies make parts: building one costs
nothing for the other ranks, so that a job of thousands can start. All parts together are the program.

`program.builder` makes both. Readers: `verify` proves a program, `simulator.program` times it, `program.document` reads
and writes it as JSON; `runtime.executor` runs a part.

    two ranks, two elements, all-reduce by exchange:

    rank 0                                  rank 1
    0 send  data[0:2] -> 1                  0 send  data[0:2] -> 0
    1 recv  other[0:2] <- 1                 1 recv  other[0:2] <- 0
    2 merge data[0:2] += other[0:2] (0, 1)  2 merge data[0:2] += other[0:2] (0, 1)

The merge waits for instruction 1, which fills `other`, and for 0, which still reads `data`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

DATA = "data"


class Op(Enum):
    """What an instruction does; `write` and `read` are its slices."""

    SEND = "send"  # read -> peer
    RECV = "recv"  # write <- peer
    MERGE = "merge"  # write += read; decodes while adding where `read` is encoded; both may be, for a sparse codec
    COPY = "copy"  # write = read
    ENCODE = "encode"  # write (encoded) = the codec's form of read + residual; the residual keeps what is not in it
    DECODE = "decode"  # write = the values of read (encoded)
    NATIVE = "native"  # one call of the engine's own collective on `write`, in place


class Collective(Enum):
    """What a program promises: who holds what at the end."""

    ALL_REDUCE = "all_reduce"  # every rank: the sum over all ranks
    REDUCE = "reduce"  # the root: the sum over all ranks
    BROADCAST = "broadcast"  # every rank: the root's data
    REDUCE_SCATTER = "reduce_scatter"  # rank r: the sum over all ranks, of chunk r
    ALL_GATHER = "all_gather"  # every rank: chunk r of rank r's data, for each r


class Slice(NamedTuple):  # a tuple, not a dataclass: it is made in a fifth of the time, and parts have thousands
    """Elements `start` to `stop` of a buffer."""

    buffer: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """How many elements it covers."""
        return self.stop - self.start

    def overlaps(self, other: "Slice") -> bool:
        """Say whether the two share an element."""
        return self.buffer == other.buffer and self.start < other.stop and other.start < self.stop

    def __str__(self) -> str:
        return f"{self.buffer}[{self.start}:{self.stop}]"


class Instruction(NamedTuple):  # a tuple, as `Slice` is
    """What a rank does in one step of a program: an operation, what it writes and reads, and what it waits for."""

    op: Op
    write: Slice | None = None
    read: Slice | None = None
    peer: int | None = None  # the other rank of a send or recv
    after: tuple[int, ...] = ()  # indices of earlier instructions of this rank that must be finished
    keeps: bool = True  # of a merge of encoded blocks: this rank's residual gets what falls out; else another rank's

    @property
    def brief(self) -> str:
        """The operation and the other rank: `send to 2`, `encode`."""
        way = {Op.SEND: " to ", Op.RECV: " from "}.get(self.op)
        return self.op.value + (f"{way}{self.peer}" if way else "")

    def __str__(self) -> str:
        arrow = {Op.SEND: f"{self.read} -> {self.peer}", Op.RECV: f"{self.write} <- {self.peer}"}
        sign = "+=" if self.op is Op.MERGE else "="
        body = arrow.get(self.op) or (f"{self.write} {sign} {self.read}" if self.read else f"{self.write}")
        body += "" if self.keeps else ", kept elsewhere"
        return f"{self.op.value:6} {body}" + (f" {self.after}" if self.after else "")


@dataclass(frozen=True, slots=True)
class Buffer:
    """Scratch memory of one rank; every rank that uses the name has one of its own."""

    name: str
    numel: int
    encoded: bool = False  # holds a codec's output for that many elements


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank does of a program."""

    strategy: str
    collective: Collective
    rank: int
    world_size: int
    numel: int  # elements of `data` on every rank
    instructions: tuple[Instruction, ...]
    buffers: tuple[Buffer, ...] = ()  # scratch of this rank; `data` is implied
    root: int = 0  # of a reduce or broadcast
    finished: frozenset[int] = frozenset()  # messages of finished sums, as indices; all others are of partial sums
    units: tuple[Slice, ...] = ()  # `data` in order, cut so that one rank finishes the sum of each; for `compress`
    servers: int = 0  # of an all-reduce: so many ranks at the end give zeros, and need not hold the result


@dataclass(frozen=True, slots=True)
class Program:
    """The instructions of all ranks, and what they promise together."""

    strategy: str
    collective: Collective
    world_size: int
    numel: int  # elements of `data` on every rank
    ranks: tuple[tuple[Instruction, ...], ...]
    buffers: tuple[Buffer, ...] = ()  # scratch; `data` is implied
    root: int = 0  # of a reduce or broadcast
    servers: int = 0  # of an all-reduce: so many ranks at the end give zeros, and need not hold the result

    def buffer(self, name: str) -> Buffer:
        """Return the buffer called `name`, `data` included."""
        if name == DATA:
            return Buffer(DATA, self.numel)
        return next(buffer for buffer in self.buffers if buffer.name == name)

    def part(self, rank: int) -> Part:
        """Return what one rank does."""
        return Part(
            self.strategy,
            self.collective,
            rank,
            self.world_size,
            self.numel,
            self.ranks[rank],
            self.buffers,
            self.root,
            servers=self.servers,
        )

    def __str__(self) -> str:
        head = f"{self.collective.value} by {self.strategy}, {self.world_size} ranks, {self.numel} elements"
        return "\n".join([head, *self._lines()])

    def _lines(self) -> Iterator[str]:
        for rank, instructions in enumerate(self.ranks):
            yield f"rank {rank}"
            yield from (f"  {index:3} {instruction}" for index, instruction in enumerate(instructions))


def join(parts: Sequence[Part]) -> Program:
    """Return the program that all parts are, in the order of their ranks.

    A buffer that several ranks declare is as large as the largest of them.
    """
    buffers: dict[str, Buffer] = {}
    for part in parts:
        for buffer in part.buffers:
            known = buffers.get(buffer.name)
            if known is None or known.numel < buffer.numel:
                buffers[buffer.name] = buffer
    first = parts[0]
    ranks = tuple(part.instructions for part in parts)
    assert len(parts) == first.world_size, f"{len(parts)} parts of {first.world_size}"
    kind = first.strategy, first.collective, first.world_size, first.numel
    return Program(*kind, ranks, tuple(buffers.values()), first.root, first.servers)


def split(numel: int, parts: int) -> list[tuple[int, int]]:
    """Cut `numel` elements into `parts` pieces as even as possible, as (start, stop); some are empty if need be.

    Chunk r of a reduce-scatter or all-gather is piece r of `split(numel, world_size)`.

    >>> split(5, 3)
    [(0, 1), (1, 3), (3, 5)]
    """
    return [(numel * part // parts, numel * (part + 1) // parts) for part in range(parts)]
