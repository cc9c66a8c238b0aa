"""Makes a `Program`: a strategy says what happens, the builder works out what must wait for what."""

from collections.abc import Iterable, Sequence

from penstock.errors import StrategyError
from penstock.program import DATA, Buffer, Collective, Instruction, Op, Program, Slice
from penstock.program.accesses import Accesses


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
        self.strategy, self.collective, self.root = strategy, collective, root
        self.world_size, self.numel = world_size, numel
        self._ranks: list[list[Instruction]] = [[] for _ in range(world_size)]
        self._buffers: dict[str, Buffer] = {DATA: Buffer(DATA, numel)}
        self._last_send: dict[int, int] = {}
        self._accesses = [Accesses() for _ in range(world_size)]

    def scratch(self, name: str, numel: int, encoded: bool = False) -> None:
        """Declare a scratch buffer."""
        assert name not in self._buffers, f"{self.strategy}: buffer {name!r} declared twice"
        self._buffers[name] = Buffer(name, numel, encoded)

    def send(self, rank: int, peer: int, read: Slice, *, in_turn: bool = False, after: Iterable[int] = ()) -> None:
        """Send `read` to `peer`; nothing is sent for an empty slice, so that the peer must not expect one either.

        It waits for the instructions `after` too. `in_turn` makes it wait for the rank's previous send: large messages
        to several ranks would share the NIC and all arrive late, where a tree wants the first of them early.
        """
        if read.numel:
            last = self._last_send.get(rank) if in_turn else None
            self._last_send[rank] = len(self._ranks[rank])
            self._add(rank, Op.SEND, None, read, peer, {*after, *(() if last is None else (last,))})

    def recv(self, rank: int, peer: int, write: Slice, *, after: Iterable[int] = ()) -> None:
        """Receive `write` from `peer`, once the instructions `after` are finished too; nothing for an empty slice."""
        if write.numel:
            self._add(rank, Op.RECV, write, None, peer, after)

    def message(self, source: int, target: int, read: Slice, write: Slice, *, in_turn: bool = False) -> None:
        """Send `read` of rank `source` into `write` of rank `target`."""
        self._check_fit(write, read)
        self.send(source, target, read, in_turn=in_turn)
        self.recv(target, source, write)

    def merge(self, rank: int, write: Slice, read: Slice, *, keeps: bool = True) -> None:
        """Add `read` to `write`; of ranks that merge the same encoded blocks, exactly one `keeps` what falls out."""
        self._compute(rank, Op.MERGE, write, read, keeps)

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
        """Call the engine's own collective on `write`; nothing for an empty slice."""
        if write.numel:
            self._add(rank, Op.NATIVE, write, None, None)

    def include(self, part: Program, ranks: Sequence[int], name: str) -> None:
        """Append a program for some of the ranks: its rank i is our `ranks[i]`, its scratch is renamed `name.x`."""
        renamed = {DATA: DATA} | {buffer.name: f"{name}.{buffer.name}" for buffer in part.buffers}
        for buffer in part.buffers:  # another part of the same name may have been larger
            known = self._buffers.get(renamed[buffer.name], buffer)
            numel = max(known.numel, buffer.numel)
            self._buffers[renamed[buffer.name]] = Buffer(renamed[buffer.name], numel, buffer.encoded)
        for rank, instructions in zip(ranks, part.ranks, strict=True):
            base = len(self._ranks[rank])
            for one in instructions:
                assert one.op is not Op.NATIVE or len(ranks) == self.world_size, "a native call takes all ranks"
                write, read = (s and Slice(renamed[s.buffer], s.start, s.stop) for s in (one.write, one.read))
                peer = None if one.peer is None else ranks[one.peer]
                self._add(rank, one.op, write, read, peer, [base + earlier for earlier in one.after], one.keeps)

    def add(self, rank: int, one: Instruction) -> None:
        """Append an instruction of another program as it is, waiting for what its slices say and for nothing else."""
        self._add(rank, one.op, one.write, one.read, one.peer, keeps=one.keeps)

    def issued(self, rank: int) -> int:
        """Return how many instructions a rank has so far: the index of its next."""
        return len(self._ranks[rank])

    def build(self) -> Program:
        """Return the finished program."""
        ranks = tuple(tuple(instructions) for instructions in self._ranks)
        scratch = tuple(buffer for name, buffer in self._buffers.items() if name != DATA)
        return Program(self.strategy, self.collective, self.world_size, self.numel, ranks, scratch, self.root)

    def _compute(self, rank: int, op: Op, write: Slice, read: Slice, keeps: bool = True) -> None:
        self._check_fit(write, read)
        if read.numel:
            self._add(rank, op, write, read, None, keeps=keeps)

    def _check_fit(self, write: Slice, read: Slice) -> None:
        if read.numel != write.numel:
            raise StrategyError(f"{self.strategy}: {read} does not fit {write}")

    def _add(
        self,
        rank: int,
        op: Op,
        write: Slice | None,
        read: Slice | None,
        peer: int | None,
        also_after: Iterable[int] = (),
        keeps: bool = True,
    ) -> None:
        index = len(self._ranks[rank])
        after = set(also_after)
        if read is not None:
            after |= self._accesses[rank].read(read.buffer, read.start, read.stop, index)
        if write is not None:
            after |= self._accesses[rank].write(write.buffer, write.start, write.stop, index)
        self._ranks[rank].append(Instruction(op, write, read, peer, tuple(sorted(after - {index})), keeps))
