"""Makes a compressed all-reduce of a dense one: every message becomes a codec's output.

A dense strategy sends two kinds of values. Partial sums land in scratch and are merged; finished sums land in `data`.

- A partial sum is encoded by whoever sends it, and the receiver decodes while it adds. What the codec could not send
  stays in the sender's residual.
- A finished sum is encoded once, by the rank that finished it. Its payload is passed on as it is, and every rank
  decodes that same payload, the one that encoded it too: so all end with the same bits.

In every such strategy each rank encodes each element exactly once, and the sum over all ranks of (data + residual) is
the same before and after: nothing is lost, only late.

    ring on 3 ranks, chunk a; [..] is encoded, r0 what rank 0 keeps

    0 -> 1   [a0]        rank 0: r0 = a0 - [a0]
    1 -> 2   [a01]       rank 1: a01 = a1 + [a0],   r1 = a01 - [a01]
    2 -> 0   [A]         rank 2: a012 = a2 + [a01], r2 = a012 - [A], its data is now [A] too
    0 -> 1   [A]         the same bytes; ranks 0 and 1 decode them after they have passed them on

Slices of encoded buffers are aligned with `data`: `out[s:t]` holds the codec's form of elements s to t.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate

from penstock.errors import StrategyError
from penstock.program import DATA, Collective, Instruction, Op, Program, Slice
from penstock.program.builder import ProgramBuilder
from penstock.strategies.pipeline import DEPTH

OUT = "out"  # partial sums, encoded here
IN = "in"  # partial sums that arrived; more such buffers where several arrive for the same elements
FINAL = "final"  # finished sums, encoded here or elsewhere


def compress(program: Program, empty: Iterable[int] = ()) -> Program:
    """Return the compressed form of a dense all-reduce; positions in `empty` have nothing to send."""
    if program.collective is not Collective.ALL_REDUCE:
        raise StrategyError(
            f"{program.strategy}: only an all-reduce can be compressed, not a {program.collective.value}"
        )
    if any(one.op in (Op.NATIVE, Op.COPY) for rank in program.ranks for one in rank):
        raise StrategyError(f"{program.strategy}: the engine's own call moves dense data; choose another strategy")
    builder = ProgramBuilder(program.strategy, program.collective, program.world_size, program.numel)
    rewriting = _Rewriting(program, builder, frozenset(empty), _finishing_sends(program))
    units = sorted(rewriting.units(), key=lambda unit: unit.start)
    for rank in range(program.world_size):
        _Rank(rewriting, rank, units).run()
    return builder.build()


def without(program: Program, positions: Collection[int]) -> Program:
    """Return a program from which some positions are taken out; none of its instructions is about these alone."""
    if not positions:
        return program
    edges = list(accumulate((position not in positions for position in range(program.numel)), initial=0))

    def moved(touched: Slice | None) -> Slice | None:
        return touched and Slice(touched.buffer, edges[touched.start], edges[touched.stop])

    ranks = tuple(
        tuple(replace(one, write=moved(one.write), read=moved(one.read)) for one in rank) for rank in program.ranks
    )
    assert all(buffer.numel == program.numel for buffer in program.buffers), "buffers are aligned with data"
    buffers = tuple(replace(buffer, numel=edges[-1]) for buffer in program.buffers)
    return replace(program, numel=edges[-1], ranks=ranks, buffers=buffers)


@dataclass(slots=True)
class _Rewriting:
    """What the ranks of one rewriting share."""

    program: Program
    builder: ProgramBuilder
    empty: frozenset[int]
    finished: set[tuple[int, int]]  # sends, as (rank, index), of finished sums
    declared: set[str] = field(default_factory=set)

    def units(self) -> Iterator[Slice]:
        """Yield the slices in which finished sums are encoded, by the ranks that finished them."""
        if self.program.world_size == 1 and self.program.numel:
            yield Slice(FINAL, 0, self.program.numel)
        for rank, instructions in enumerate(self.program.ranks):
            known: list[Slice] = []
            for index, one in enumerate(instructions):
                if one.op is Op.RECV and one.write is not None and one.write.buffer == DATA:
                    known.append(_in(FINAL, one.write))
                elif (rank, index) in self.finished and one.read is not None:
                    for unit in _without(_in(FINAL, one.read), known):
                        known.append(unit)
                        yield unit

    def buffer(self, name: str) -> str:
        """Declare an encoded buffer on first use; return its name."""
        if name not in self.declared:
            self.declared.add(name)
            self.builder.scratch(name, self.program.numel, encoded=True)
        return name

    def is_empty(self, touched: Slice) -> bool:
        return all(position in self.empty for position in range(touched.start, touched.stop)) if self.empty else False


class _Rank:
    """The rewriting of one rank's instructions."""

    def __init__(self, shared: _Rewriting, rank: int, units: list[Slice]) -> None:
        self.shared, self.rank, self.units = shared, rank, units
        self.builder = shared.builder
        self.old = shared.program.ranks[rank]
        self.new: dict[int, int] = {}  # index of a dense instruction: of what it became
        self.inbox: dict[Slice, Slice] = {}  # scratch of the dense program: where its values arrive now
        self.arrivals: list[Slice] = []
        self.encoded: set[Slice] = set()  # units that are in FINAL
        self.waiting: dict[int, list[Slice]] = {}  # dense receive of finished sums: units to decode

    def run(self) -> None:
        for index, one in enumerate(self.old):
            if not self.shared.is_empty(self._elements(index, one)):
                self._rewrite(index, one)
        for arrived in list(self.waiting):
            self._decode(arrived)
        if self.shared.program.world_size == 1:
            for unit in self.units:
                self._encode_final(unit)
                self.builder.decode(self.rank, _in(DATA, unit), unit)

    def _rewrite(self, index: int, one: Instruction) -> None:
        own: list[Slice] = []
        if one.op is Op.SEND:
            own = self._send(index, one)
        elif one.op is Op.RECV:
            self._recv(index, one)
        else:
            self._merge(index, one)
        for unit in own:  # now that it is on its way
            self.builder.decode(self.rank, _in(DATA, unit), unit)
        for earlier in one.after:
            self._decode(earlier)

    def _send(self, index: int, one: Instruction) -> list[Slice]:
        """Send partial sums encoded, or finished ones; return the units that were finished here."""
        assert one.read is not None
        assert one.peer is not None
        finished = (self.rank, index) in self.shared.finished
        coded = _in(self.shared.buffer(FINAL if finished else OUT), one.read)
        own = [unit for unit in self._units(coded) if unit not in self.encoded] if finished else []
        for unit in own:
            self._encode_final(unit)
        if not finished:
            self.builder.encode(self.rank, coded, one.read)
        self.new[index] = self.builder.issued(self.rank)
        after = [earlier for earlier in one.after if self.old[earlier].op is Op.SEND]
        self.builder.send(self.rank, one.peer, coded, after=self._renumbered(after))
        return own

    def _recv(self, index: int, one: Instruction) -> None:
        assert one.write is not None
        assert one.peer is not None
        if one.write.buffer == DATA:
            coded = _in(self.shared.buffer(FINAL), one.write)
            self.waiting[index] = self._units(coded)
            self.encoded.update(self.waiting[index])
        else:
            coded = self._slot(self._merged_into(index, one.write))
            self.inbox[one.write] = coded
        self.new[index] = self.builder.issued(self.rank)
        after = [earlier for earlier in one.after if self.old[earlier].op is not Op.SEND]  # those read `data`
        self.builder.recv(self.rank, one.peer, coded, after=self._renumbered(after))

    def _renumbered(self, indices: Iterable[int]) -> list[int]:
        return [self.new[index] for index in indices if index in self.new]

    def _merge(self, index: int, one: Instruction) -> None:
        assert one.write is not None
        assert one.read is not None
        self.new[index] = self.builder.issued(self.rank)
        self.builder.merge(self.rank, one.write, self.inbox[one.read])

    def _decode(self, arrived: int) -> None:
        for unit in self.waiting.pop(arrived, []):
            self.builder.decode(self.rank, _in(DATA, unit), unit)

    def _encode_final(self, unit: Slice) -> None:
        self.shared.buffer(FINAL)
        self.encoded.add(unit)
        self.builder.encode(self.rank, unit, _in(DATA, unit))

    def _elements(self, index: int, one: Instruction) -> Slice:
        """Return the elements of `data` that an instruction is about."""
        if one.op is Op.RECV and one.write is not None and one.write.buffer != DATA:
            return self._merged_into(index, one.write)
        touched = one.read if one.op is Op.SEND else one.write
        assert touched is not None
        return touched

    def _merged_into(self, index: int, scratch: Slice) -> Slice:
        """Return the elements of `data` that a received block is added to."""
        later = (one for one in self.old[index:] if one.op is Op.MERGE and one.read == scratch)
        merge = next(later, None)
        if merge is None or merge.write is None or merge.write.buffer != DATA:
            raise StrategyError(
                f"{self.shared.program.strategy}: {scratch} arrives and is not added to data as a whole"
            )
        return merge.write

    def _slot(self, target: Slice) -> Slice:
        """Return where the payload for some elements arrives: several for the same ones may be under way at once."""
        around = {other for other in self.arrivals if other.overlaps(target) and other != target}
        again = self.arrivals.count(target) % DEPTH
        self.arrivals.append(target)
        name = f"{IN}{len(around)}" + (f".{again}" if again else "")
        return _in(self.shared.buffer(name), target)

    def _units(self, coded: Slice) -> list[Slice]:
        """Return the units that a slice of finished sums is made of."""
        inside = [unit for unit in self.units if unit.overlaps(coded) and not self.shared.is_empty(unit)]
        if any(unit.start < coded.start or coded.stop < unit.stop for unit in inside):
            raise StrategyError(f"{self.shared.program.strategy}: {coded} is sent in part; it was encoded as a whole")
        return inside


def _finishing_sends(program: Program) -> set[tuple[int, int]]:
    """Return the sends of finished sums: those whose receive writes to `data`; the k-th send fills the k-th receive."""
    receives: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    for rank, instructions in enumerate(program.ranks):
        for one in instructions:
            if one.op is Op.RECV and one.peer is not None and one.write is not None:
                receives[one.peer, rank].append(one.write)
    count: dict[tuple[int, int], int] = defaultdict(int)
    found = set()
    for rank, instructions in enumerate(program.ranks):
        for index, one in enumerate(instructions):
            if one.op is Op.SEND and one.peer is not None:
                link = (rank, one.peer)
                if receives[link][count[link]].buffer == DATA:
                    found.add((rank, index))
                count[link] += 1
    return found


def _in(buffer: str, touched: Slice) -> Slice:
    """Return the same elements of another buffer."""
    return Slice(buffer, touched.start, touched.stop)


def _without(whole: Slice, known: Iterable[Slice]) -> list[Slice]:
    """Return the stretches of `whole` that no known slice covers."""
    left = [whole]
    for other in known:
        left = [
            Slice(whole.buffer, start, stop)
            for one in left
            for start, stop in ((one.start, min(one.stop, other.start)), (max(one.start, other.stop), one.stop))
            if start < stop
        ]
    return left
