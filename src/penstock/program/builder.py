"""Makes programs and parts: a strategy says what happens, the builder works out what must wait for what."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from penstock.errors import StrategyError
from penstock.program import DATA, Buffer, Collective, Instruction, Op, Part, Program, Slice, join
from penstock.program.accesses import Accesses

_SEND, _RECV, _NATIVE = Op.SEND, Op.RECV, Op.NATIVE  # a name is found at once; a member of an Enum takes 0.3 us
_MERGE, _COPY, _ENCODE, _DECODE = Op.MERGE, Op.COPY, Op.ENCODE, Op.DECODE
_new = tuple.__new__  # without the names of the fields: a part has thousands of instructions


@contextmanager
def without_collecting() -> Iterator[None]:
    """Keep Python's collector of cycles off meanwhile.

    Parts and schedules are many small objects that stay and have no cycles. The collector, started by their number,
    looks through all objects of the process again and again and finds nothing: 219 ms with it, 156 without (a ring).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class PartBuilder:
    """Collects one rank's instructions and works out their dependencies from the slices they touch.

    An instruction waits for every earlier one that writes what it reads or writes, or reads what it writes. So a
    strategy only says what happens, in an order that would be right on one thread.
    """

    def __init__(
        self, strategy: str, collective: Collective, rank: int, world_size: int, numel: int, root: int = 0
    ) -> None:
        if world_size < 1:
            raise StrategyError(f"{strategy}: world size {world_size}; wanted >= 1")
        if numel < 0:
            raise StrategyError(f"{strategy}: {numel} elements; wanted >= 0")
        if not 0 <= root < world_size:
            raise StrategyError(f"{strategy}: root {root}; wanted 0..{world_size - 1}")
        if not 0 <= rank < world_size:
            raise StrategyError(f"{strategy}: rank {rank}; wanted 0..{world_size - 1}")
        self.strategy, self.collective, self.root = strategy, collective, root
        self.rank, self.world_size, self.numel = rank, world_size, numel
        self.units: Sequence[Slice] = ()  # see `Part`
        self._instructions: list[Instruction] = []
        self._finished: set[int] = set()
        self._buffers: dict[str, Buffer] = {}
        self._last_send: int | None = None
        self._accesses = Accesses()

    def scratch(self, name: str, numel: int, encoded: bool = False) -> None:
        """Declare a scratch buffer."""
        assert name not in self._buffers, f"{self.strategy}: buffer {name!r} declared twice"
        assert name != DATA
        self._buffers[name] = Buffer(name, numel, encoded)

    def send(
        self, peer: int, read: Slice, *, in_turn: bool = False, finished: bool = False, after: Iterable[int] = ()
    ) -> None:
        """Send `read` to `peer`; nothing is sent for an empty slice, so that the peer must not expect one either.

        It waits for the instructions `after` too. `in_turn` makes it wait for the rank's previous send: large messages
        to several ranks would share the NIC and all arrive late, where a tree wants the first of them early.
        `finished` says that what it sends is the sum over all ranks.
        """
        if read[1] < read[2]:
            index = len(self._instructions)
            waits = set(after) if after else set()
            if in_turn and self._last_send is not None:
                waits.add(self._last_send)
            self._last_send = index
            if finished:
                self._finished.add(index)
            self._add(_SEND, None, read, peer, waits)

    def recv(self, peer: int, write: Slice, *, finished: bool = False, after: Iterable[int] = ()) -> None:
        """Receive `write` from `peer`, once the instructions `after` are finished too; nothing for an empty slice.

        `finished` says that what comes is the sum over all ranks, as what comes into `data` always is.
        """
        if write[1] < write[2]:
            if finished or write[0] == DATA:
                self._finished.add(len(self._instructions))
            self._add(_RECV, write, None, peer, set(after) if after else set())

    def message(self, source: int, target: int, read: Slice, write: Slice, *, in_turn: bool = False) -> None:
        """Send `read` of rank `source` into `write` of rank `target`, as far as one of them is this rank.

        What arrives in `data` is a finished sum: it takes the place of what was there.
        """
        if read.numel != write.numel:
            raise StrategyError(f"{self.strategy}: {read} does not fit {write}")
        if source == self.rank:
            self.send(target, read, in_turn=in_turn, finished=write.buffer == DATA)
        if target == self.rank:
            self.recv(source, write)

    def merge(self, write: Slice, read: Slice, *, keeps: bool = True) -> None:
        """Add `read` to `write`; of ranks that merge the same encoded blocks, exactly one `keeps` what falls out."""
        self._compute(_MERGE, write, read, keeps)

    def copy(self, write: Slice, read: Slice) -> None:
        """Copy `read` to `write`."""
        self._compute(_COPY, write, read)

    def encode(self, write: Slice, read: Slice) -> None:
        """Encode `read` into `write`."""
        self._compute(_ENCODE, write, read)

    def decode(self, write: Slice, read: Slice) -> None:
        """Decode `read` into `write`."""
        self._compute(_DECODE, write, read)

    def native(self, write: Slice) -> None:
        """Call the engine's own collective on `write`; nothing for an empty slice."""
        if write.numel:
            self._add(_NATIVE, write, None, None, set())

    def include(self, part: Part, ranks: Sequence[int], name: str, *, in_turn: bool = False) -> None:
        """Append a part of a program for some of the ranks: its rank i is our `ranks[i]`, its scratch is `name.x`.

        With `in_turn` its first send waits for the rank's last send before it, as in `send`.
        """
        assert ranks[part.rank] == self.rank, f"rank {part.rank} of {ranks} is not {self.rank}"
        renamed = {DATA: DATA} | {buffer.name: f"{name}.{buffer.name}" for buffer in part.buffers}
        for buffer in part.buffers:  # another part of the same name may have been larger
            known = self._buffers.get(renamed[buffer.name], buffer)
            numel = max(known.numel, buffer.numel)
            self._buffers[renamed[buffer.name]] = Buffer(renamed[buffer.name], numel, buffer.encoded)
        if len(ranks) != self.world_size:
            assert all(one.op is not _NATIVE for one in part.instructions), "a native call takes all ranks"
        base = len(self._instructions)
        for one in part.instructions:
            write, read, peer = one.write, one.read, one.peer
            if write is not None and write[0] != DATA:
                write = _new(Slice, (renamed[write[0]], write[1], write[2]))
            if read is not None and read[0] != DATA:
                read = _new(Slice, (renamed[read[0]], read[1], read[2]))
            if peer is not None:
                peer = ranks[peer]
            after = {base + earlier for earlier in one.after}
            if one.op is _SEND:
                if in_turn and self._last_send is not None and self._last_send < base:
                    after.add(self._last_send)
                self._last_send = len(self._instructions)
            self._add(one.op, write, read, peer, after, one.keeps)

    def add(self, one: Instruction) -> None:
        """Append an instruction of another part as it is, waiting for what its slices say and for nothing else."""
        self._add(one.op, one.write, one.read, one.peer, set(), one.keeps)

    @property
    def issued(self) -> int:
        """How many instructions there are so far: the index of the next."""
        return len(self._instructions)

    def build(self) -> Part:
        """Return the finished part."""
        return Part(
            self.strategy,
            self.collective,
            self.rank,
            self.world_size,
            self.numel,
            tuple(self._instructions),
            tuple(self._buffers.values()),
            self.root,
            frozenset(self._finished),
            tuple(self.units),
        )

    def _compute(self, op: Op, write: Slice, read: Slice, keeps: bool = True) -> None:
        numel = read[2] - read[1]
        if numel != write[2] - write[1]:
            raise StrategyError(f"{self.strategy}: {read} does not fit {write}")
        if numel:
            self._add(op, write, read, None, set(), keeps)

    def _add(
        self, op: Op, write: Slice | None, read: Slice | None, peer: int | None, after: set[int], keeps: bool = True
    ) -> None:
        index = len(self._instructions)
        if read is not None:
            self._accesses.read(*read, index, after)
        if write is not None:
            self._accesses.write(*write, index, after)
        waits = tuple(sorted(after)) if len(after) > 1 else tuple(after)
        self._instructions.append(_new(Instruction, (op, write, read, peer, waits, keeps)))


class ProgramBuilder:
    """Collects the instructions of all ranks: for programs made by hand. Each method is a `PartBuilder`'s."""

    def __init__(self, strategy: str, collective: Collective, world_size: int, numel: int, root: int = 0) -> None:
        self.world_size, self.numel = world_size, numel
        self.parts = [
            PartBuilder(strategy, collective, rank, world_size, numel, root) for rank in range(max(world_size, 1))
        ]

    def scratch(self, name: str, numel: int, encoded: bool = False) -> None:
        """Declare a scratch buffer of every rank."""
        for part in self.parts:
            part.scratch(name, numel, encoded)

    def send(self, rank: int, peer: int, read: Slice, *, in_turn: bool = False, after: Iterable[int] = ()) -> None:
        """Let `rank` send `read` to `peer`."""
        self.parts[rank].send(peer, read, in_turn=in_turn, after=after)

    def recv(self, rank: int, peer: int, write: Slice, *, after: Iterable[int] = ()) -> None:
        """Let `rank` receive `write` from `peer`."""
        self.parts[rank].recv(peer, write, after=after)

    def message(self, source: int, target: int, read: Slice, write: Slice, *, in_turn: bool = False) -> None:
        """Send `read` of rank `source` into `write` of rank `target`."""
        for rank in dict.fromkeys((source, target)):
            self.parts[rank].message(source, target, read, write, in_turn=in_turn)

    def merge(self, rank: int, write: Slice, read: Slice, *, keeps: bool = True) -> None:
        """Let `rank` add `read` to `write`."""
        self.parts[rank].merge(write, read, keeps=keeps)

    def copy(self, rank: int, write: Slice, read: Slice) -> None:
        """Let `rank` copy `read` to `write`."""
        self.parts[rank].copy(write, read)

    def encode(self, rank: int, write: Slice, read: Slice) -> None:
        """Let `rank` encode `read` into `write`."""
        self.parts[rank].encode(write, read)

    def decode(self, rank: int, write: Slice, read: Slice) -> None:
        """Let `rank` decode `read` into `write`."""
        self.parts[rank].decode(write, read)

    def native(self, rank: int, write: Slice) -> None:
        """Let `rank` call the engine's own collective on `write`."""
        self.parts[rank].native(write)

    def include(self, program: Program, ranks: Sequence[int], name: str) -> None:
        """Append a program for some of the ranks: its rank i is our `ranks[i]`, its scratch is renamed `name.x`."""
        for index, rank in enumerate(ranks):
            self.parts[rank].include(program.part(index), ranks, name)

    def add(self, rank: int, one: Instruction) -> None:
        """Append an instruction of another program as it is, waiting for what its slices say and for nothing else."""
        self.parts[rank].add(one)

    def build(self) -> Program:
        """Return the finished program."""
        return join([part.build() for part in self.parts])


def whole(make: Callable[[int], Part], world_size: int) -> Program:
    """Return the program of the parts that `make` makes for each rank."""
    if world_size < 1:
        make(0)  # says what is wrong with it
    return join([make(rank) for rank in range(world_size)])
