"""Makes a compressed all-reduce of a dense one: every message becomes a codec's output.

A dense strategy sends two kinds of values. Partial sums land in scratch and are merged; finished sums land in `data`.

- A partial sum is encoded by its sender, and the receiver decodes while it adds. What the codec could not send
  stays in the sender's residual.
- A finished sum is encoded once, by the rank that finished it. Its payload is passed on as it is, and every rank
  decodes that same payload, the one that encoded it too: so all end with the same bits.

Which of a rank's sends are of finished sums, and in which units these are encoded, the strategy says (`Part.finished`,
`Part.units`): so one rank's part is compressed without a look at the others', and they agree.

In every such strategy each rank encodes each element exactly once, and the sum over all ranks of (data + residual) is
the same before and after: nothing is lost, only late.

    ring on 3 ranks, chunk a; [..] is encoded, r0 what rank 0 keeps

    0 -> 1   [a0]        rank 0: r0 = a0 - [a0]
    1 -> 2   [a01]       rank 1: a01 = a1 + [a0],   r1 = a01 - [a01]
    2 -> 0   [A]         rank 2: a012 = a2 + [a01], r2 = a012 - [A], its data is now [A] too
    0 -> 1   [A]         the same bytes; ranks 0 and 1 decode them after they have passed them on

Slices of encoded buffers are aligned with `data`: `out[s:t]` holds the codec's form of elements s to t.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from penstock.errors import StrategyError
from penstock.program import DATA, Collective, Instruction, Op, Part, Slice
from penstock.program.builder import PartBuilder
from penstock.strategies.pipeline import DEPTH
from penstock.strategies.strategy import CodedBuilder, Options

_new = tuple.__new__  # as in the builder: a part has thousands of slices
_SEND, _RECV, _MERGE, _COPY, _NATIVE = Op.SEND, Op.RECV, Op.MERGE, Op.COPY, Op.NATIVE  # as in the builder
OUT = "out"  # partial sums, encoded here
IN = "in"  # partial sums that arrived; more such buffers where several arrive for the same elements
FINAL = "final"  # finished sums, encoded here or elsewhere


def compressed(build: Callable[[int, int, int, Options], Part]) -> CodedBuilder:
    """Return the builder of the compressed form of a dense all-reduce."""

    def build_coded(rank: int, world_size: int, numel: int, options: Options, empty: Collection[int] = ()) -> Part:
        return compress(build(rank, world_size, numel, options), empty)

    return build_coded


def compress(part: Part, empty: Iterable[int] = ()) -> Part:
    """Return the compressed form of a rank's part of a dense all-reduce; positions in `empty` have nothing to send."""
    if part.collective is not Collective.ALL_REDUCE:
        raise StrategyError(f"{part.strategy}: only an all-reduce can be compressed, not a {part.collective.value}")
    if any(one[0] is _NATIVE or one[0] is _COPY for one in part.instructions):
        raise StrategyError(f"{part.strategy}: the engine's own call moves dense data; choose another strategy")
    return _Rewriting(part, frozenset(empty)).run()


def serial(part: Part) -> Part:
    """Return a part in which a rank computes nothing while it sends.

    A computation waits for all sends before it, and a send for all computations before it. What arrives meanwhile was
    posted ahead: its sender waits for it.
    """
    instructions, sends, computations = list[Instruction](), list[int](), list[int]()
    for index, one in enumerate(part.instructions):
        before = {_SEND: computations, _RECV: ()}.get(one.op, sends)
        instructions.append(one._replace(after=tuple(sorted({*one.after, *before}))))
        if one.op is not _RECV:
            (sends if one.op is _SEND else computations).append(index)
    return replace(part, instructions=tuple(instructions))


def without(part: Part, positions: Collection[int]) -> Part:
    """Return a part from which some positions are taken out; none of its instructions is about these alone."""
    if not positions:
        return part
    edges = list(accumulate((position not in positions for position in range(part.numel)), initial=0))

    def moved(touched: Slice | None) -> Slice | None:
        return touched and Slice(touched.buffer, edges[touched.start], edges[touched.stop])

    instructions = tuple(one._replace(write=moved(one.write), read=moved(one.read)) for one in part.instructions)
    assert all(buffer.numel == part.numel for buffer in part.buffers), "buffers are aligned with data"
    buffers = tuple(replace(buffer, numel=edges[-1]) for buffer in part.buffers)
    return replace(part, numel=edges[-1], instructions=instructions, buffers=buffers, units=())


class _Rewriting:
    """The rewriting of one rank's instructions."""

    def __init__(self, part: Part, empty: frozenset[int]) -> None:
        self.part = part
        self.builder = PartBuilder(part.strategy, part.collective, part.rank, part.world_size, part.numel)
        self.old = part.instructions
        self.units = [_in(FINAL, unit) for unit in part.units]
        if part.world_size == 1 and part.numel:
            self.units = [Slice(FINAL, 0, part.numel)]
        self.unit_starts = [unit.start for unit in self.units]
        self.unit_at = dict(zip(self.unit_starts, self.units, strict=True))
        self.filled = list(accumulate((one not in empty for one in range(part.numel)), initial=0)) if empty else None
        self.sends = {index for index, one in enumerate(self.old) if one[0] is _SEND}
        self.merged_into = _merged_into(self.old)
        self.new: list[Sequence[int]] = []  # index of a dense instruction: of what it became, or waited for
        self.inbox: dict[Slice, Slice] = {}  # scratch of the dense part: where its values arrive now
        self.apart = _are_apart(self.merged_into.values())  # no two partial sums that arrive overlap in part
        self.arrivals: dict[Slice, int] = {}  # elements that arrived so far as partial sums: how often
        self.arrival_edges: list[tuple[int, int]] = []  # the same in order
        self.longest_arrival = 0
        self.declared: set[str] = set()
        self.encoded: set[Slice] = set()  # units that are in FINAL
        self.waiting: dict[int, list[Slice]] = {}  # dense receive of finished sums: units to decode

    def run(self) -> Part:
        for index, one in enumerate(self.old):
            if self.filled is not None and self._is_empty(self._elements(index, one)):
                self._drop(index, one)
            else:
                self._rewrite(index, one)
        for arrived in list(self.waiting):
            self._decode(arrived)
        if self.part.world_size == 1:
            for unit in self.units:
                self._encode_final(unit)
                self.builder.decode(_in(DATA, unit), unit)
        return replace(self.builder.build(), servers=self.part.servers)

    def _drop(self, index: int, one: Instruction) -> None:
        """Leave an instruction out; what waited for it waits for what it would have waited for."""
        sends = one.op is _SEND
        alike = [earlier for earlier in one.after if (earlier in self.sends) == sends]
        self.new.append(tuple(dict.fromkeys(self._renumbered(alike))))  # each once, or they double with every drop

    def _rewrite(self, index: int, one: Instruction) -> None:
        op, write, read, peer, after, _ = one
        if op is _SEND:
            assert read is not None
            assert peer is not None
            for unit in self._send(index, read, peer, after):  # now that it is on its way
                self.builder.decode(_in(DATA, unit), unit)
        elif op is _RECV:
            assert write is not None
            assert peer is not None
            self._recv(index, write, peer, after)
        else:
            assert write is not None
            assert read is not None
            self.new.append((self.builder.issued,))
            self.builder.merge(write, self.inbox[read])
        if self.waiting:
            for earlier in after:
                if earlier in self.waiting:
                    self._decode(earlier)

    def _send(self, index: int, read: Slice, peer: int, after: Sequence[int]) -> Sequence[Slice]:
        """Send partial sums encoded, or finished ones; return the units that were finished here."""
        builder = self.builder
        own: Sequence[Slice] = ()
        finished = index in self.part.finished
        if finished:
            coded = _in(self._buffer(FINAL), read)
            own = tuple(unit for unit in self._units(coded) if unit not in self.encoded)
            for unit in own:
                self._encode_final(unit)
        else:
            coded = _in(self._buffer(OUT), read)
            builder.encode(coded, read)
        self.new.append((builder.issued,))
        sends = [earlier for earlier in after if earlier in self.sends]
        builder.send(peer, coded, finished=finished, after=self._renumbered(sends) if sends else ())
        return own

    def _recv(self, index: int, write: Slice, peer: int, after: Sequence[int]) -> None:
        builder = self.builder
        if write[0] == DATA:
            coded = _in(self._buffer(FINAL), write)
            self.waiting[index] = self._units(coded)
            self.encoded.update(self.waiting[index])
        else:
            coded = self._slot(self._added_to(index, write))
            self.inbox[write] = coded
        self.new.append((builder.issued,))
        after = [earlier for earlier in after if earlier not in self.sends]  # those read `data`
        finished = write[0] == DATA
        builder.recv(peer, coded, finished=finished, after=self._renumbered(after) if after else ())

    def _renumbered(self, indices: Iterable[int]) -> list[int]:
        return [new for index in indices for new in self.new[index]]

    def _decode(self, arrived: int) -> None:
        for unit in self.waiting.pop(arrived):
            self.builder.decode(_in(DATA, unit), unit)

    def _encode_final(self, unit: Slice) -> None:
        self._buffer(FINAL)
        self.encoded.add(unit)
        self.builder.encode(unit, _in(DATA, unit))

    def _buffer(self, name: str) -> str:
        """Declare an encoded buffer on first use; return its name."""
        if name not in self.declared:
            self.declared.add(name)
            self.builder.scratch(name, self.part.numel, encoded=True)
        return name

    def _is_empty(self, touched: Slice) -> bool:
        return self.filled is not None and self.filled[touched.start] == self.filled[touched.stop]

    def _elements(self, index: int, one: Instruction) -> Slice:
        """Return the elements of `data` that an instruction is about."""
        if one.op is _RECV and one.write is not None and one.write.buffer != DATA:
            return self._added_to(index, one.write)
        touched = one.read if one.op is _SEND else one.write
        assert touched is not None
        return touched

    def _added_to(self, index: int, scratch: Slice) -> Slice:
        """Return the elements of `data` that a received block is added to."""
        merged = self.merged_into.get(index)
        if merged is None or merged.buffer != DATA:
            raise StrategyError(f"{self.part.strategy}: {scratch} arrives and is not added to data as a whole")
        return merged

    def _slot(self, target: Slice) -> Slice:
        """Return where the payload for some elements arrives: several for the same ones may be under way at once."""
        before = self.arrivals.get(target, 0)
        self.arrivals[target] = before + 1
        around = 0 if self.apart else self._arrived_around(target)
        again = before % DEPTH
        name = f"{IN}{around}.{again}" if again else f"{IN}{around}"
        return _in(self._buffer(name), target)

    def _arrived_around(self, target: Slice) -> int:
        """Count the slices that arrived before and overlap `target` without being it."""
        if self.arrivals[target] == 1:
            insort(self.arrival_edges, (target.start, target.stop))
            self.longest_arrival = max(self.longest_arrival, target.numel)
        edges, found = self.arrival_edges, 0
        place = bisect_left(edges, (target.stop, 0))
        while place > 0 and edges[place - 1][0] > target.start - self.longest_arrival:
            place -= 1
            start, stop = edges[place]
            found += stop > target.start and (start, stop) != (target.start, target.stop)
        return found

    def _units(self, coded: Slice) -> list[Slice]:
        """Return the units that a slice of finished sums is made of."""
        alone = self.unit_at.get(coded.start)
        if alone == coded and self.filled is None:  # most are
            return [coded]
        first = bisect_right(self.unit_starts, coded.start) - 1
        stop = bisect_left(self.unit_starts, coded.stop)
        inside = [unit for unit in self.units[max(first, 0) : stop] if not self._is_empty(unit)]
        if any(unit.start < coded.start or coded.stop < unit.stop for unit in inside):
            raise StrategyError(f"{self.part.strategy}: {coded} is sent in part; it was encoded as a whole")
        return inside


def _merged_into(instructions: tuple[Instruction, ...]) -> dict[int, Slice]:
    """Return, for the index of each receive into scratch, what the next merge of that scratch adds it to."""
    found: dict[int, Slice] = {}
    merges: dict[Slice, Slice] = {}  # scratch: what it is added to by the next merge
    for index in range(len(instructions) - 1, -1, -1):
        op, write, read, _, _, _ = instructions[index]
        if op is _MERGE and read is not None and write is not None:
            merges[read] = write
        elif op is _RECV and write in merges:
            assert write is not None
            found[index] = merges[write]
    return found


def _are_apart(slices: Iterable[Slice]) -> bool:
    """Say whether slices are equal or disjoint."""
    edges = sorted({(start, stop) for _, start, stop in slices})
    return all(one[1] <= other[0] for one, other in pairwise(edges))


def _in(buffer: str, touched: Slice) -> Slice:
    """Return the same elements of another buffer."""
    return _new(Slice, (buffer, touched[1], touched[2]))
