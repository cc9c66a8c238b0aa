"""A `Program`: what every rank does to carry out one collective, as plain data.

Each rank has a list of instructions over slices of named buffers. `data` is the user's tensor; other buffers are
scratch. Positions are elements, not bytes: no message may cut an element in two, and the same program serves every
element type. Instructions of one rank are issued in list order; `after` names the earlier instructions of the same
rank that must be finished first. Sends and receives are asynchronous, and the k-th message from one rank to another
is received by the k-th receive from it: every engine keeps that order.

Readers: `verify` proves a program, `simulator.program` times it, `runtime.executor` runs it.

    two ranks, two elements, all-reduce by exchange:

    rank 0                                  rank 1
    0 send  data[0:2] -> 1                  0 send  data[0:2] -> 0
    1 recv  other[0:2] <- 1                 1 recv  other[0:2] <- 0
    2 merge data[0:2] += other[0:2] (0, 1)  2 merge data[0:2] += other[0:2] (0, 1)

The merge waits for instruction 1, which fills `other`, and for 0, which still reads `data`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from penstock.errors import StrategyError

FORMAT = "penstock-program/1"
DATA = "data"


class Op(Enum):
    """What an instruction does; `write` and `read` are its slices."""

    SEND = "send"  # read -> peer
    RECV = "recv"  # write <- peer
    MERGE = "merge"  # write += read; decodes while adding where `read` is encoded
    COPY = "copy"  # write = read
    ENCODE = "encode"  # write (encoded) = the codec's form of read
    DECODE = "decode"  # write = the values of read (encoded)
    NATIVE = "native"  # one call of the engine's own collective on `write`, in place


class Collective(Enum):
    """What a program promises: who holds what at the end."""

    ALL_REDUCE = "all_reduce"  # every rank: the sum over all ranks
    REDUCE = "reduce"  # the root: the sum over all ranks
    BROADCAST = "broadcast"  # every rank: the root's data
    REDUCE_SCATTER = "reduce_scatter"  # rank r: the sum over all ranks, of chunk r
    ALL_GATHER = "all_gather"  # every rank: chunk r of rank r's data, for each r


@dataclass(frozen=True, slots=True)
class Slice:
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


@dataclass(frozen=True, slots=True)
class Instruction:
    """One thing one rank does."""

    op: Op
    write: Slice | None = None
    read: Slice | None = None
    peer: int | None = None  # the other rank of a send or recv
    after: tuple[int, ...] = ()  # indices of earlier instructions of this rank that must be finished

    def __str__(self) -> str:
        arrow = {Op.SEND: f"{self.read} -> {self.peer}", Op.RECV: f"{self.write} <- {self.peer}"}
        sign = "+=" if self.op is Op.MERGE else "="
        body = arrow.get(self.op) or (f"{self.write} {sign} {self.read}" if self.read else f"{self.write}")
        return f"{self.op.value:6} {body}" + (f" {self.after}" if self.after else "")


@dataclass(frozen=True, slots=True)
class Buffer:
    """Scratch memory of one rank; every rank that uses the name has one of its own."""

    name: str
    numel: int
    encoded: bool = False  # holds a codec's output for that many elements


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

    def buffer(self, name: str) -> Buffer:
        """Return the buffer called `name`, `data` included."""
        if name == DATA:
            return Buffer(DATA, self.numel)
        return next(buffer for buffer in self.buffers if buffer.name == name)

    def __str__(self) -> str:
        head = f"{self.collective.value} by {self.strategy}, {self.world_size} ranks, {self.numel} elements"
        return "\n".join([head, *self._lines()])

    def _lines(self) -> Iterator[str]:
        for rank, instructions in enumerate(self.ranks):
            yield f"rank {rank}"
            yield from (f"  {index:3} {instruction}" for index, instruction in enumerate(instructions))


class ProgramBuilder:
    """Collects instructions and works out their dependencies from the slices they touch.

    An instruction waits for every earlier one of its rank that writes what it reads or writes, or reads what it
    writes. So a strategy only says what happens, in an order that would be right on one thread.
    """

    def __init__(self, strategy: str, collective: Collective, world_size: int, numel: int, root: int = 0) -> None:
        if world_size < 1:
            raise StrategyError(f"{strategy}: world size {world_size}; wanted >= 1")
        if numel < 0:
            raise StrategyError(f"{strategy}: {numel} elements; wanted >= 0")
        if not 0 <= root < world_size:
            raise StrategyError(f"{strategy}: root {root}; wanted 0..{world_size - 1}")
        self.strategy, self.collective, self.world_size, self.numel, self.root = (
            strategy,
            collective,
            world_size,
            numel,
            root,
        )
        self._ranks: list[list[Instruction]] = [[] for _ in range(world_size)]
        self._accesses: list[dict[str, list[tuple[Slice, int, bool]]]] = [{} for _ in range(world_size)]
        self._buffers: dict[str, Buffer] = {}

    def scratch(self, name: str, numel: int, encoded: bool = False) -> None:
        """Declare a scratch buffer."""
        self._buffers[name] = Buffer(name, numel, encoded)

    def message(self, source: int, target: int, read: Slice, write: Slice) -> None:
        """Send `read` of rank `source` into `write` of rank `target`; nothing is sent for an empty slice."""
        if read.numel != write.numel:
            raise StrategyError(f"{self.strategy}: {read} does not fit {write}")
        if read.numel:
            self._add(source, Op.SEND, None, read, target)
            self._add(target, Op.RECV, write, None, source)

    def merge(self, rank: int, write: Slice, read: Slice) -> None:
        """Add `read` to `write`."""
        self._compute(rank, Op.MERGE, write, read)

    def copy(self, rank: int, write: Slice, read: Slice) -> None:
        """Copy `read` to `write`."""
        self._compute(rank, Op.COPY, write, read)

    def encode(self, rank: int, write: Slice, read: Slice) -> None:
        """Encode `read` into `write`."""
        self._compute(rank, Op.ENCODE, write, read)

    def decode(self, rank: int, write: Slice, read: Slice) -> None:
        """Decode `read` into `write`."""
        self._compute(rank, Op.DECODE, write, read)

    def native(self, rank: int, write: Slice) -> None:
        """Call the engine's own collective on `write`."""
        self._add(rank, Op.NATIVE, write, None, None)

    def build(self) -> Program:
        """Return the finished program."""
        ranks = tuple(tuple(instructions) for instructions in self._ranks)
        buffers = tuple(self._buffers.values())
        return Program(self.strategy, self.collective, self.world_size, self.numel, ranks, buffers, self.root)

    def _compute(self, rank: int, op: Op, write: Slice, read: Slice) -> None:
        if read.numel != write.numel:
            raise StrategyError(f"{self.strategy}: {read} does not fit {write}")
        if read.numel:
            self._add(rank, op, write, read, None)

    def _add(self, rank: int, op: Op, write: Slice | None, read: Slice | None, peer: int | None) -> None:
        index = len(self._ranks[rank])
        after: set[int] = set()
        if read is not None:
            after |= self._conflicts(rank, read, writes_only=True)
        if write is not None:
            after |= self._conflicts(rank, write, writes_only=False)
        self._ranks[rank].append(Instruction(op, write, read, peer, tuple(sorted(after))))
        if read is not None:
            self._note(rank, read, index, writes=False)
        if write is not None:
            self._note(rank, write, index, writes=True)

    def _conflicts(self, rank: int, touched: Slice, writes_only: bool) -> set[int]:
        accesses = self._accesses[rank].get(touched.buffer, ())
        return {index for slice_, index, wrote in accesses if (wrote or not writes_only) and slice_.overlaps(touched)}

    def _note(self, rank: int, touched: Slice, index: int, writes: bool) -> None:
        accesses = self._accesses[rank].setdefault(touched.buffer, [])
        if writes:  # whoever conflicts with an older access inside this slice now conflicts with this one instead
            accesses[:] = [a for a in accesses if not (touched.start <= a[0].start and a[0].stop <= touched.stop)]
        accesses.append((touched, index, writes))


def program_document(program: Program) -> dict[str, Any]:
    """Return the program as a `penstock-program/1` document."""
    return {
        "format": FORMAT,
        "strategy": program.strategy,
        "collective": program.collective.value,
        "world_size": program.world_size,
        "numel": program.numel,
        "root": program.root,
        "buffers": [{"name": b.name, "numel": b.numel, "encoded": b.encoded} for b in program.buffers],
        "ranks": [[_instruction_document(i) for i in instructions] for instructions in program.ranks],
    }


def _instruction_document(instruction: Instruction) -> dict[str, Any]:
    slices = {"write": instruction.write, "read": instruction.read}
    document: dict[str, Any] = {"op": instruction.op.value}
    document |= {key: [s.buffer, s.start, s.stop] for key, s in slices.items() if s is not None}
    if instruction.peer is not None:
        document["peer"] = instruction.peer
    return {**document, "after": list(instruction.after)} if instruction.after else document
