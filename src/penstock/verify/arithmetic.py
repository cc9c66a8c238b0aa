"""What instructions do to symbolic memory, and what can go wrong with the values while they do it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.program import DATA, Collective, Op, Program, Slice, split
from penstock.verify.findings import Finding, Kind, blame
from penstock.verify.memory import Expressions, Memory, Piece, Unit, Value, place


@dataclass(frozen=True, slots=True)
class Loss:
    """A write to `data` that replaced contributions by a value without them."""

    rank: int
    index: int
    step: int
    start: int
    stop: int
    contributors: int  # bit set of what was lost


@dataclass(frozen=True, slots=True)
class Cut:
    """A merge of encoded blocks, which leaves out what does not fit."""

    rank: int
    index: int
    step: int
    keeps: bool  # in this rank's residual


@dataclass(frozen=True, slots=True)
class Encoding:
    """A codec output for elements `start` to `stop`; what is not in it went to the rank's residual."""

    rank: int
    index: int
    step: int
    start: int
    stop: int
    expression: int  # of the output


class Arithmetic:
    """Applies instructions to the memories of all ranks and collects findings."""

    def __init__(self, program: Program, expressions: Expressions, memories: Sequence[Memory]) -> None:
        self.program, self.expressions, self.memories = program, expressions, memories
        self.findings: list[Finding] = []
        self.losses: list[Loss] = []
        self.cuts: dict[int, list[Cut]] = {}  # expression of a merged block: the merges that made it
        self.encodings: list[Encoding] = []  # and merges of encoded blocks that keep what they drop

    def compute(self, rank: int, index: int, step: int) -> None:
        """Carry out a merge, copy, encode or decode."""
        instruction = self.program.ranks[rank][index]
        read, write = instruction.read, instruction.write
        assert read is not None
        assert write is not None
        pieces = self.read(rank, index, read, step)
        if instruction.op is Op.ENCODE:
            pieces = self._encoded(rank, index, step, pieces)
        elif self.program.buffer(read.buffer).encoded and not self.program.buffer(write.buffer).encoded:
            pieces = [(start, stop, value and value._replace(unit=None)) for start, stop, value in pieces]
        arrived = place(pieces, read, write, index)
        self._check_aligned(rank, index, step, write, arrived)
        if instruction.op is Op.MERGE and self.program.buffer(write.buffer).encoded:
            self._merge_blocks(rank, index, write, arrived, step)
        elif instruction.op is Op.MERGE:
            self._merge(rank, index, write, arrived, step)
        else:
            self.store(rank, index, write, arrived, step)

    def read(self, rank: int, index: int, touched: Slice, step: int) -> list[Piece]:
        """Return what a slice holds; it must have been written, and an encoded one be whole.

        A message may carry several codec outputs, one after the other; what is decoded is one.
        """
        pieces = self.memories[rank].read(touched)
        if any(value is None for _, _, value in pieces):
            self._blame(Kind.READ_BEFORE_WRITE, rank, index, step, f"reads {touched}, which nothing has filled")
        elif self.program.buffer(touched.buffer).encoded:
            units = _whole_units(pieces)
            if not units or (units > 1 and self.program.ranks[rank][index].op is not Op.SEND):
                self._blame(Kind.CUT_ENCODING, rank, index, step, f"reads {touched}, which is not one codec output")
        return pieces

    def store(self, rank: int, index: int, touched: Slice, pieces: Iterable[Piece], step: int) -> None:
        """Replace what a slice holds; remember contributions that vanish from `data`."""
        for start, stop, value in pieces:
            for low, high, old in self.memories[rank].read(Slice(touched.buffer, start, stop)):
                if touched.buffer == DATA and old is not None and value is not None and old.shift == value.shift:
                    lost = self._contributors(old) & ~self._contributors(value)
                    if lost:
                        self.losses.append(Loss(rank, index, step, low, high, lost))
            self.memories[rank].write(touched, [(start, stop, value)])

    def native(self, calls: Sequence[tuple[int, int]], step: int) -> None:
        """Carry out the engine's own collective on the slice that all ranks named."""
        rank, index = calls[0]
        touched = self.program.ranks[rank][index].write
        assert touched is not None
        for low, high in self._common_cuts([rank for rank, _ in calls], touched):
            parts = [self.memories[rank].read(Slice(touched.buffer, low, high))[0][2] for rank, _ in calls]
            if any(part is None for part in parts):
                self._blame(Kind.READ_BEFORE_WRITE, rank, index, step, f"reads {touched}, which nothing has filled")
                continue
            held = [part for part in parts if part is not None]
            self._check_disjoint(held, rank, index, step)
            for (other, call), value in zip(calls, self._native_results(held, touched, low), strict=True):
                self.memories[other].write(touched, [(low, high, value._replace(writer=call))])

    def common_contributors(self, pieces: Iterable[Piece]) -> int:
        """Return the bit set of the ranks whose data is in every element of the pieces."""
        common = -1
        for _, _, value in pieces:
            common &= self._contributors(value) if value is not None else 0
        return common

    def _merge(self, rank: int, index: int, write: Slice, arrived: Iterable[Piece], step: int) -> None:
        for start, stop, value in arrived:
            for low, high, old in self.memories[rank].read(Slice(write.buffer, start, stop)):
                if old is None:
                    self._blame(Kind.READ_BEFORE_WRITE, rank, index, step, f"adds to {write}, which nothing has filled")
                elif value is not None:
                    merged = self._sum(rank, index, low, old, value, step)
                    self.memories[rank].write(write, [(low, high, merged)])

    def _merge_blocks(self, rank: int, index: int, write: Slice, arrived: Sequence[Piece], step: int) -> None:
        """Add one codec output to another: one unit again, whose every element depends on all of both."""
        held = self.read(rank, index, write, step)
        if any(value is None for _, _, value in (*held, *arrived)):
            return
        self._merge(rank, index, write, arrived, step)  # checks what is added to what
        sums = [(start, stop, value) for start, stop, value in self.memories[rank].read(write) if value is not None]
        content = tuple((stop - start, value.expression, start + value.shift) for start, stop, value in sums)
        for start, stop, value in sums:
            unit = Unit(content, write.numel, start - write.start)
            expression = self.expressions.merged(value.expression, unit)
            keeps = self.program.ranks[rank][index].keeps
            self.cuts.setdefault(expression, []).append(Cut(rank, index, step, keeps))
            if keeps:
                self.encodings.append(Encoding(rank, index, step, start + value.shift, stop + value.shift, expression))
            self.memories[rank].write(write, [(start, stop, Value(expression, value.shift, index, unit))])

    def _sum(self, rank: int, index: int, position: int, old: Value, new: Value, step: int) -> Value:
        if old.shift != new.shift:
            self._blame_element(rank, index, position, old, new, step)
        elif self._contributors(old) & self._contributors(new):
            again = _ranks(self._contributors(old) & self._contributors(new))
            self._blame(
                Kind.DOUBLED, rank, index, step, f"adds {again} to element {position + old.shift} a second time"
            )
        return Value(self.expressions.add(old.expression, new.expression), old.shift, index, old.unit)

    def _blame_element(self, rank: int, index: int, position: int, old: Value, new: Value, step: int) -> None:
        """Report a merge of different elements; say so if the right message is another one of the same sender."""
        found, wanted = position + new.shift, position + old.shift
        read = self.program.ranks[rank][index].read
        assert read is not None
        source = next((v.writer for _, _, v in self.memories[rank].read(read) if v is not None), None)
        arrival = self.program.ranks[rank][source] if source is not None else None
        kind = Kind.WRONG_ELEMENT
        if arrival is not None and arrival.op is Op.RECV and self._also_sent(arrival.peer, rank, read.numel, wanted):
            kind = Kind.MISORDERED
        self._blame(kind, rank, index, step, f"adds element {found} to element {wanted}")

    def _also_sent(self, source: int | None, target: int, numel: int, wanted: int) -> bool:
        assert source is not None
        sends = [one for one in self.program.ranks[source] if one.op is Op.SEND and one.peer == target]
        return any(one.read is not None and one.read.start == wanted and one.read.numel == numel for one in sends)

    def _check_aligned(self, rank: int, index: int, step: int, write: Slice, pieces: Sequence[Piece]) -> None:
        """Check that encoded blocks stand where their elements do: that is where their residual is."""
        if self.program.buffer(write.buffer).encoded and any(value and value.shift for _, _, value in pieces):
            self._blame(Kind.WRONG_ELEMENT, rank, index, step, f"puts other elements than its own in {write}")

    def _encoded(self, rank: int, index: int, step: int, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the codec's output for the pieces: one unit, whose every element depends on all of them."""
        if any(value is None for _, _, value in pieces):
            return list(pieces)
        held = [(start, stop, value) for start, stop, value in pieces if value is not None]
        content = tuple((stop - start, value.expression, start + value.shift) for start, stop, value in held)
        first, numel = held[0][0], held[-1][1] - held[0][0]
        coded: list[Piece] = []
        for start, stop, value in held:
            unit = Unit(content, numel, start - first, (rank, index))
            expression = self.expressions.coded(value.expression, unit)
            coded.append((start, stop, Value(expression, value.shift, None, unit)))
            self.encodings.append(Encoding(rank, index, step, start + value.shift, stop + value.shift, expression))
        return coded

    def _native_results(self, held: list[Value], touched: Slice, position: int) -> list[Value]:
        """Return what each rank holds at `position` after the engine's collective."""
        collective, count = self.program.collective, len(held)
        if collective is Collective.BROADCAST:
            return [held[self.program.root]] * count
        if collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
            chunks = split(touched.numel, count)
            owner = next(r for r, (low, high) in enumerate(chunks) if low <= position - touched.start < high)
        if collective is Collective.ALL_GATHER:
            return [held[owner]] * count
        total = held[0]._replace(expression=self.expressions.native(tuple(value.expression for value in held)))
        if collective is Collective.ALL_REDUCE:
            return [total] * count
        receiver = self.program.root if collective is Collective.REDUCE else owner
        return [total if rank == receiver else value for rank, value in enumerate(held)]

    def _check_disjoint(self, held: list[Value], rank: int, index: int, step: int) -> None:
        if self.program.collective in (Collective.BROADCAST, Collective.ALL_GATHER):
            return
        seen = 0
        for value in held:
            if value.shift != held[0].shift:
                self._blame(Kind.WRONG_ELEMENT, rank, index, step, "adds different elements of different ranks")
            if seen & self._contributors(value):
                again = _ranks(seen & self._contributors(value))
                self._blame(Kind.DOUBLED, rank, index, step, f"adds {again} a second time")
            seen |= self._contributors(value)

    def _common_cuts(self, ranks: Iterable[int], touched: Slice) -> list[tuple[int, int]]:
        """Return the stretches of a slice on which every rank holds one value and which lie in one chunk."""
        cuts = {touched.start + low for low, _ in split(touched.numel, self.program.world_size)}
        for rank in ranks:
            cuts |= {start for start, _, _ in self.memories[rank].read(touched)}
        edges = [*sorted(cut for cut in cuts if touched.start <= cut < touched.stop), touched.stop]
        return list(pairwise(edges))

    def _contributors(self, value: Value) -> int:
        return self.expressions.contributors(value.expression)

    def _blame(self, kind: Kind, rank: int, index: int, step: int, detail: str) -> None:
        known = any((one.kind, one.rank, one.index) == (kind, rank, index) for one in self.findings)
        if not known:
            self.findings.append(blame(self.program, kind, rank, index, detail, step))


def _whole_units(pieces: Sequence[Piece]) -> int:
    """Return of how many whole codec outputs the pieces consist; 0 where one is cut."""
    count, position = 0, 0
    while position < len(pieces):
        start, _, value = pieces[position]
        unit = value.unit if value is not None else None
        if unit is None or unit.offset:
            return 0
        end = start + unit.numel
        while position < len(pieces) and pieces[position][0] < end:
            low, high, value = pieces[position]
            if value is None or high > end or value.unit != unit._replace(offset=low - start):
                return 0
            position += 1
        if pieces[position - 1][1] != end:
            return 0
        count += 1
    return count


def _ranks(contributors: int) -> str:
    found = [str(rank) for rank in range(contributors.bit_length()) if contributors >> rank & 1]
    return f"rank {found[0]}'s part" if len(found) == 1 else f"the parts of ranks {', '.join(found)}"
