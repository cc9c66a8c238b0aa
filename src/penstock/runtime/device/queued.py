"""Compressed programs that never leave the device: the host queues everything and waits for nothing.

    step 0   encode what is sent                        kernels, for all pieces of the bucket together
    step 1   messages of the first round                one group of sends and receives on device buffers
    step 2   add what arrived, encode the sums          kernels
    step 3   messages of the second round, ...
    last     decode what no rank waits for              kernels

The program is the one that ranks run over gloo, without its messages' turns (`rounds.widen`), and so are its pieces,
its kernels and the order of every sum: the result has the same bits. Messages have the largest size that the codec can
need, since only the device knows a smaller one: codecs whose payloads vary in size stay on the route through the host.
Blocks of a sparse codec, which vary on the host, have indices of one size here.

Everything that does not change is resolved when a bucket is first seen: memory, launches, groups of messages. What is
not finite is NaN on every rank, as kernels see to it; the host learns of it when the bucket comes the next time.

Buckets take their steps together. A bucket's second round is queued with the first round of the next bucket, as one
group of messages, and what was queued last is waited for then, not before:

    bucket 2 comes   decode 0;   add 1, encode its sums;   encode 2;   messages: last round of 1, first round of 2

Kernels of the model that the host queues after a bucket would otherwise stand behind a wait for its messages wherever
a device has fewer queues than there are streams, as CUDA's devices have: the backward pass then stops while messages
are under way. On GPT-2 over 10 Gb/s, that was a third of what communication cost.

Payloads take memory on the device: what bucket 2 sends and receives, and the finished sums of bucket 1. They lie in
rooms that buckets take in turn (`Bindings`), and what can be received into the bucket itself, whose gradients are not
needed any more by then, takes none (`lent_memory`).
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any, Protocol

import torch

from penstock.codecs.codec import Codec
from penstock.codecs.payload_block import Look, Piece, QueuedForm, QueuedMergingForm, runs
from penstock.errors import StrategyError
from penstock.program import DATA, Instruction, Op, Program, Slice
from penstock.runtime.device.coded import numbered
from penstock.runtime.device.mirror import Mark, Message
from penstock.runtime.device.rounds import Round, rounds, widen
from penstock.runtime.executor import program_digest
from penstock.runtime.layout import PAYLOAD_ALIGNMENT, Layout, lay_out
from penstock.strategies.batches import Batches

Work = Callable[[], None]
_MESSAGES = (Op.SEND, Op.RECV)
_ITEMSIZE = 4  # buckets are float32


class Messages(Protocol):
    """What moves device memory, in the order of the current stream."""

    sent_nbytes: int  # so far, by this rank
    bindings: "Bindings"  # of all programs that send by them

    def calls(self, messages: Sequence[Message]) -> Sequence[Any]:
        """Return what starts messages, for the stages of a flight."""

    def launch(self, flight: "Flight", rooms: int = 1) -> None:
        """Queue the first stage of a bucket, and one of every bucket that is on its way; all ranks do alike.

        `rooms`: so many stages must lie between two buckets in one room.
        """

    def behind(self, work: Work) -> None:
        """Do `work` once everything of all buckets so far is queued; at once where none is on its way."""

    def land(self) -> None:
        """Queue all that is left of all buckets on their way."""


@dataclass(frozen=True, slots=True)
class Step:
    """Instructions that are queued together: messages of a round, or computations of one kind."""

    op: Op  # SEND stands for messages both ways, of which a rank may have none
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """What one round of a bucket queues: kernels, and then messages, which go with those of other buckets."""

    works: Sequence[Work]
    calls: Sequence[Any]  # of `Messages`; the last stage has none


@dataclass(slots=True, eq=False)
class Room:
    """Memory for payloads that several buckets use, one after the other: a region for each buffer of a program."""

    name: tuple[int, int]  # the same on all ranks: how many there are, and which of them it is
    memory: torch.Tensor
    regions: dict[tuple[str, str], tuple[int, int]]  # strategy, buffer -> first byte, and the most that came so far

    def grow(self, needed: Mapping[tuple[str, str], int]) -> None:
        """Have regions of at least so many bytes."""
        if all(nbytes <= self.regions.get(region, (0, -1))[1] for region, nbytes in needed.items()):
            return
        sizes = {region: nbytes for region, (_, nbytes) in self.regions.items()}
        self._lay_out(_largest([sizes, needed]))

    def shrink(self, needed: Sequence[Mapping[tuple[str, str], int]]) -> None:
        """Have regions of no more bytes than the largest need."""
        sizes = _largest(needed)
        if any(nbytes > sizes.get(region, -1) for region, (_, nbytes) in self.regions.items()):
            self._lay_out(sizes)

    def _lay_out(self, sizes: Mapping[tuple[str, str], int]) -> None:
        starts = accumulate(sizes.values(), initial=0)
        self.regions = {region: (start, sizes[region]) for region, start in zip(sizes, starts, strict=False)}
        self.memory = torch.zeros(sum(sizes.values()), dtype=torch.uint8, device=self.memory.device)


def _largest(needed: Sequence[Mapping[tuple[str, str], int]]) -> dict[tuple[str, str], int]:
    """Return the most bytes that a region is to have."""
    found = dict[tuple[str, str], int]()
    for sizes in needed:
        found |= {region: max(nbytes, found.get(region, 0)) for region, nbytes in sizes.items()}
    return found


class Flight:
    """A bucket on its way: the stages that are left, and what is to be done behind the last."""

    def __init__(self, stages: Sequence[Stage], sent_nbytes: int, room: Room) -> None:
        self._left, self.sent_nbytes, self.room = [*stages][::-1], sent_nbytes, room
        self.advanced = 0  # stages that were queued
        self.behind: list[Work] = []

    @property
    def left(self) -> int:
        """Stages that are not queued yet."""
        return len(self._left)

    def advance(self) -> Sequence[Any]:
        """Queue the next stage; return what starts its messages."""
        stage = self._left.pop()
        self.advanced += 1
        for work in (*stage.works, *(() if self._left else self.behind)):
            work()
        return stage.calls


def prepare_queued(
    program: Program, rank: int, codec: Codec, form: QueuedForm, batches: Batches, messages: Messages
) -> "Queued":
    """Resolve all that does not depend on the bucket, which is float32."""
    wide = widen(program)
    encoded = {buffer.name for buffer in wide.buffers if buffer.encoded}
    for one in wide.ranks[rank]:
        if one.op is Op.NATIVE:
            raise StrategyError(f"{program.strategy}: {one} on the device; send it over gloo or MPI")
        if one.op is Op.MERGE and _is_in(one.write, encoded) and not codec.capabilities.merging:
            raise StrategyError(
                f"{program.strategy}: adds encoded blocks, which {codec.name} cannot; use a sparse codec"
            )
    digest = f"{program_digest(wide, 'float32', codec, batches)} queued"
    layout = lay_out(wide.part(rank), _ITEMSIZE, form.max_nbytes, batches)
    ordered = steps_of_all(wide)
    rooms = max(map(rooms_needed, wide.ranks, ordered))  # of all ranks, which must queue alike
    return Queued(wide, rank, form, messages, layout, ordered[rank], rooms, digest)


def steps_of_all(program: Program) -> list[tuple[Step, ...]]:
    """Return what each rank queues, in order: what messages wait for as early as it can, all else at the end."""
    together = list(zip(*rounds(program), strict=True))
    return [_steps(instructions, rank, together) for rank, instructions in enumerate(program.ranks)]


def _steps(instructions: Sequence[Instruction], rank: int, together: Sequence[Sequence[Round]]) -> tuple[Step, ...]:
    needed = _awaited_by_messages(instructions)
    found: list[Step] = []
    late: list[int] = []
    for ranks in together:
        if any(one.messages for one in ranks):
            found.append(Step(Op.SEND, ranks[rank].messages))
        found += _together(instructions, [index for index in ranks[rank].computations if index in needed])
        late += [index for index in ranks[rank].computations if index not in needed]
    return (*found, *_together(instructions, late))


def _awaited_by_messages(instructions: Sequence[Instruction]) -> set[int]:
    """Return the instructions that some message has to wait for."""
    needed = {index for index, one in enumerate(instructions) if one.op in _MESSAGES}
    for index in range(len(instructions) - 1, -1, -1):  # `after` points backwards
        if index in needed:
            needed.update(instructions[index].after)
    return needed


def _together(instructions: Sequence[Instruction], indices: Sequence[int]) -> Iterator[Step]:
    """Yield computations in an order that they allow, those of one kind that wait for nothing as one step."""
    left = list(indices)
    while left:
        ready = [index for index in left if not any(earlier in left for earlier in instructions[index].after)]
        op = instructions[ready[0]].op
        chosen = tuple(index for index in ready if instructions[index].op is op)
        left = [index for index in left if index not in chosen]
        yield Step(op, chosen)


def rooms_needed(instructions: Sequence[Instruction], steps: Sequence[Step]) -> int:
    """Return after how many buckets a room for payloads may be used again.

    With each bucket, all that are on their way queue a stage: kernels, the oldest bucket's first, then messages as one
    group. A buffer that is first written in stage w and last used in stage u is free for the bucket that comes u - w
    later if a kernel uses it last, which stands before that bucket's; if a message does, for the next one. Buckets
    have different sizes: what is free of a buffer before the rest of it may be where another bucket has something else.

    Parameter servers need one room. In a ring, finished sums are passed on from round to round and decoded at the end.
    """
    used, stage = dict[str, tuple[int, int]](), 0  # buffer -> stage of its first write, and 2 stage + is a message
    for step in steps:
        for index in step.indices:
            for slice_ in (instructions[index].write, instructions[index].read):
                if slice_ is not None and slice_.buffer != DATA:
                    first, _ = used.get(slice_.buffer, (stage, 0))
                    used[slice_.buffer] = first, 2 * stage + (step.op is Op.SEND)
        stage += step.op is Op.SEND
    return max((max(1, (last + 1) // 2 - first) for first, last in used.values()), default=1)


def lent_memory(instructions: Sequence[Instruction], steps: Sequence[Step], layout: Layout) -> dict[str, int]:
    """Return the buffers that lie in the bucket itself, each with its first byte there.

    Gradients that were encoded are not read again before their average is written. So their memory is free for what is
    used in between. On rank 1 of four, by parameter servers:

        step     0: encode   1: messages   2: add         3: encode   4: messages   5: decode
        data 0   read                                                               written
        in0                  received      added to 1                                          lies in data 0, 2 or 3

    A buffer, like a message, is one stretch of memory: where one of them finds none, none is lent.
    """
    uses, spans = _uses(instructions, steps)
    lent, taken = dict[str, int](), list[Piece]()
    for name, (start, stop) in layout.buffers().items():
        first, last = spans[name]
        free = [position for position, found in uses.items() if _is_free(found, first, last)]
        if not free:
            continue
        assert layout.batches is not None
        pieces = sorted(piece for position in free for piece in layout.batches.pieces[position])
        place = _first_fit(runs(pieces), taken, stop - start)
        if place is None:
            return {}
        lent[name] = place
        taken.append((place, place + stop - start))
    return lent


def _uses(
    instructions: Sequence[Instruction], steps: Sequence[Step]
) -> tuple[dict[int, list[tuple[int, bool]]], dict[str, tuple[int, int]]]:
    """Return in which steps each position of the data is used, and whether what was there is only written over; and the
    first and the last step of each buffer."""
    data, spans = dict[int, list[tuple[int, bool]]](), dict[str, tuple[int, int]]()
    for number, step in enumerate(steps):
        for one in (instructions[index] for index in step.indices):
            for slice_, is_overwritten in ((one.read, False), (one.write, one.op is not Op.MERGE)):
                if slice_ is None:
                    continue
                if slice_.buffer != DATA:
                    spans[slice_.buffer] = spans.get(slice_.buffer, (number, number))[0], number
                    continue
                for position in range(slice_.start, slice_.stop):
                    data.setdefault(position, []).append((number, is_overwritten))
    return data, spans


def _is_free(uses: Sequence[tuple[int, bool]], first: int, last: int) -> bool:
    """Say whether the memory of a position holds nothing that is needed from step `first` to step `last`."""
    return any(
        before < first and last < after and is_overwritten
        for (before, _), (after, is_overwritten) in pairwise([(-1, False), *uses])
    )


def _first_fit(free: Sequence[Piece], taken: Sequence[Piece], nbytes: int) -> int | None:
    """Return the first aligned byte of so many that lie in one stretch of free elements, and that are not taken."""
    for start, stop in free:
        place = _aligned(start * _ITEMSIZE)
        for low, high in sorted(taken):
            if low < place + nbytes and place < high:
                place = _aligned(high)
        if place + nbytes <= stop * _ITEMSIZE:
            return place
    return None


def _aligned(byte: int) -> int:
    return -(-byte // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT


class Bindings:
    """Programs on the memory of buckets. Those of buckets that come no more are let go, with memory on the device.

    torch makes other buckets after its first iteration, and a plan makes others again; what was bound to the old ones
    holds them, their residuals and messages. A bucket that still comes does so at least once in as many runs as there
    are bindings.

    Payloads lie in rooms that buckets take in turn, as many as their program needs (`rooms_needed`). What is queued for
    a bucket in a room stands in the stream behind all that the one before it did there.
    """

    def __init__(self) -> None:
        self._runs = 0
        self._bound: dict[Hashable, tuple[_Bound, int]] = {}  # and the run in which each was used last
        self._rooms: dict[tuple[int, int], Room] = {}  # by how many there are, and whose turn it is
        self._given: Counter[int] = Counter()

    def room(self, rooms: int, needed: Mapping[tuple[str, str], int], device: torch.device) -> Room:
        """Return memory for the payloads of the next bucket that is bound, one of `rooms` in turn.

        Buckets that were bound to other memory than the room has then are bound again when they come.
        """
        name = rooms, self._given[rooms] % rooms
        self._given[rooms] += 1
        room = self._rooms.setdefault(name, Room(name, torch.zeros(0, dtype=torch.uint8, device=device), {}))
        room.grow(needed)
        return room

    def __len__(self) -> int:
        return len(self._bound)

    def use(self, key: Hashable, make: Callable[[], "_Bound"]) -> "_Bound":
        """Return what is bound under a key, made where there is nothing; forget what is no longer used."""
        self._runs += 1
        bound = self._bound[key][0] if key in self._bound else make()
        if bound.is_outgrown:
            bound = bound.anew()
        self._bound[key] = bound, self._runs
        gone = [each for each, (_, run) in self._bound.items() if self._runs - run > len(self._bound)]
        for old in gone:
            self._bound.pop(old)[0].settle()
        if gone:  # torch's first buckets, or another plan's: they may have been larger than all that still come
            for room in self._rooms.values():
                room.shrink([each.needed for each, _ in self._bound.values() if each.room is room])
        return bound

    def settle(self) -> None:
        """Hear of what the last run of each found."""
        for bound, _ in self._bound.values():
            bound.settle()


class Queued:
    """One rank's part of a compressed program on a device, ready to run any number of times."""

    dtype = "float32"

    def __init__(
        self, program: Program, rank: int, form: QueuedForm, messages: Messages, layout: Layout,
        steps: Sequence[Step], rooms: int, digest: str,
    ) -> None:  # fmt: skip
        assert layout.batches is not None
        self.program, self.rank, self.form, self.messages, self.layout = program, rank, form, messages, layout
        self.part = program.part(rank)
        self.steps, self.digest, self.numel = steps, digest, layout.batches.numel
        self.rooms, self.rounds = rooms, sum(step.op is Op.SEND for step in steps)
        self.regions = {(program.strategy, name): bounds for name, bounds in layout.buffers().items()}
        self.encoded = {buffer.name for buffer in program.buffers if buffer.encoded}
        merges = any(one.op is Op.MERGE and _is_in(one.write, self.encoded) for one in self.part.instructions)
        self._lent = {} if merges else lent_memory(self.part.instructions, steps, layout)  # both blocks lie together
        self.ordinals = numbered(layout)  # of its pieces among those of the bucket

    @property
    def pieces(self) -> list[Piece]:
        """What is encoded by itself, in the order of the bucket."""
        return list(self.ordinals)

    def run(
        self,
        data: torch.Tensor,
        call: int = 0,
        timeout_seconds: float = 0.0,
        recorder: Any = None,
        staged: Any = None,
        residual: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> None:
        """Queue the program on the current stream, for a flat tensor and a residual that stay where they are.

        Its later rounds are queued with the next program, or when the messages `land`. The other arguments are those
        of `Prepared.run`; the host sees nothing that it could number, stop or record.
        """
        _check(data, residual, self.numel, self.program.strategy)
        bound = self.bind(data.detach().view(-1), residual)
        if scale != 1.0:
            data.mul_(scale)
        self.messages.launch(bound.fly(self.form.begin(len(self.ordinals))), self.rooms)

    def needed(self, lent: Collection[str]) -> dict[tuple[str, str], int]:
        """Return the bytes of each region of a room that is needed where some buffers are lent."""
        return {each: stop - start for each, (start, stop) in self.regions.items() if each[1] not in lent}

    def was_sent_nan(self, data: torch.Tensor) -> bool:
        """Say nothing: whether a sum is NaN is heard of through the codec, when the bucket comes again."""
        return False

    def bind(self, data: torch.Tensor, residual: torch.Tensor | None) -> "_Bound":
        """Return the program on the memory of a bucket and its residual, once it has told what its last run found."""
        bound = self._bind(data, residual)
        bound.settle()
        return bound

    def _bind(self, data: torch.Tensor, residual: torch.Tensor | None) -> "_Bound":
        bindings = self.messages.bindings
        key = id(self), data.data_ptr(), 0 if residual is None else residual.data_ptr()

        def make() -> _Bound:
            lent = {} if data.data_ptr() % PAYLOAD_ALIGNMENT else self._lent
            room = bindings.room(self.rooms, self.needed(lent), data.device)
            return _Bound(self, data, residual, room, lent)

        return bindings.use(key, make)


def _check(data: torch.Tensor, residual: torch.Tensor | None, numel: int, strategy: str) -> None:
    if data.numel() != numel or data.dtype is not torch.float32:
        raise StrategyError(f"{strategy}: {data.numel()} elements of {data.dtype}; prepared for {numel} of float32")
    if residual is not None and (residual.numel() != numel or residual.dtype is not torch.float32):
        found = f"a residual of {residual.numel()} elements of {residual.dtype}"
        raise StrategyError(f"{strategy}: {found}; wanted {numel} of float32")


class _Bound:
    """A program on one bucket's memory, with a room for payloads."""

    def __init__(
        self, owner: Queued, bucket: torch.Tensor, residual: torch.Tensor | None, room: Room, lent: Mapping[str, int]
    ) -> None:
        self._owner, self._bucket, self._residual, self.room, self._lent = owner, bucket, residual, room, lent
        self.needed = owner.needed(lent)  # of the room
        self._memory, self._own_bytes = room.memory, bucket.view(torch.uint8)
        self._moved = {
            region[1]: (lent[region[1]] if region[1] in lent else room.regions[region][0]) - start
            for region, (start, _) in owner.regions.items()
        }
        self._instructions, self._encoded = owner.part.instructions, owner.encoded
        self._outcome = _Outcome(owner.form.queued_look(bucket, owner.pieces), Mark(bucket.device))
        self._seed = [0]  # of what is encoded in this run; no work refers to `self`, which dies when it is let go
        self._sent_nbytes = 0
        self._stages = [*self._make_stages()]
        owner.form.compile()

    @property
    def is_outgrown(self) -> bool:
        """Whether its room has other memory by now."""
        return self._memory is not self.room.memory

    def anew(self) -> "_Bound":
        """Return the same on the memory that its room has now."""
        self.settle()
        return _Bound(self._owner, self._bucket, self._residual, self.room, self._lent)

    def fly(self, seed: int) -> Flight:
        """Return a run of everything; `seed`: what encoders start their random numbers from."""
        self._seed[0] = seed
        return Flight(self._stages, self._sent_nbytes, self.room)

    def settle(self) -> None:
        """Hear of what the last run found; an iteration later the device has long got there."""
        self._outcome.settle()

    def _make_stages(self) -> Iterator[Stage]:
        """Yield what each round queues; payloads that are added to the same pieces in turn are one launch."""
        works: list[Work] = []
        for _, group in groupby(self._owner.steps, key=self._decoded):
            steps = list(group)
            if self._decoded(steps[0]) is not None:
                works += self._decoding(steps)
                continue
            for step in steps:
                if step.op is Op.SEND:
                    yield Stage(self._replayed(works), self._calls(step))
                    works = []
                else:
                    works += self._works_of(step)
        yield Stage([*self._replayed(works), self._outcome.ask], ())

    def _replayed(self, works: Sequence[Work]) -> Sequence[Work]:
        """Return the same work as one launch, where it has kernels: launching takes the host longer than they run."""
        return [self._owner.form.replayed(partial(_each, tuple(works)))] if works else []

    def _calls(self, step: Step) -> Sequence[Any]:
        messages = [self._message(self._instructions[index]) for index in step.indices]
        self._sent_nbytes += sum(memory.nbytes for sent, memory, _ in messages if sent)
        return self._owner.messages.calls(messages)

    def _decoded(self, step: Step) -> tuple[Any, ...] | None:
        """Return what a step decodes or adds to, and where from; None where it does something else."""
        ones = [self._instructions[index] for index in step.indices]
        decodes = step.op in (Op.DECODE, Op.MERGE)
        if not decodes or any(self._coded(one) is None or _is_in(one.write, self._encoded) for one in ones):
            return None
        return tuple((one.write, self._is_lent(one)) for one in ones)

    def _works_of(self, step: Step) -> Iterator[Work]:
        ones = [self._instructions[index] for index in step.indices]
        if step.op is Op.ENCODE:
            yield from self._encoding(ones)
        else:
            yield from (self._dense(one) if self._coded(one) is None else self._merging(one) for one in ones)

    def _message(self, one: Instruction) -> Message:
        sent = one.op is Op.SEND
        assert one.peer is not None
        return sent, self._bytes(one.read if sent else one.write), one.peer

    def _coded(self, one: Instruction) -> Slice | None:
        """Return the encoded slice of a computation that codes; a copy of one moves bytes."""
        if one.op is Op.COPY:
            return None
        return next((each for each in (one.write, one.read) if _is_in(each, self._encoded)), None)

    def _is_lent(self, one: Instruction) -> bool:
        """Say whether the payloads of a computation lie in the bucket."""
        slice_ = self._coded(one)
        assert slice_ is not None
        return slice_.buffer in self._lent

    def _by_memory(self, ones: Sequence[Instruction]) -> Iterator[tuple[torch.Tensor, list[int]]]:
        """Yield the memory that payloads of computations lie in, and which of the computations those are."""
        for memory, wanted in ((self._memory, False), (self._own_bytes, True)):
            chosen = [index for index, one in enumerate(ones) if self._is_lent(one) is wanted]
            if chosen:
                yield memory, chosen

    def _encoding(self, ones: Sequence[Instruction]) -> Iterator[Work]:
        for memory, chosen in self._by_memory(ones):
            pieces, places = self._pieces([ones[index] for index in chosen])
            ordinals = [self._owner.ordinals[piece] for piece in pieces]
            encode = self._owner.form.queued_encoder(self._bucket, self._residual, memory, pieces, places, ordinals)
            yield partial(_with_seed, encode, self._seed)

    def _merging(self, one: Instruction) -> Work:
        """Return what adds encoded blocks to others."""
        form: QueuedMergingForm = self._owner.form  # type: ignore[assignment]  # `prepare_queued` looked
        assert one.read is not None
        (pieces, places), others = self._pieces([one]), self._places(one.read, self._owner.layout.pieces(one.read))
        return form.queued_merger(self._residual if one.keeps else None, self._memory, pieces, places, [*others])

    def _decoding(self, steps: Sequence[Step]) -> Iterator[Work]:
        rows = [[self._instructions[index] for index in step.indices] for step in steps]
        for memory, chosen in self._by_memory(rows[0]):
            found = [self._pieces([row[index] for index in chosen]) for row in rows]
            adds, places = steps[0].op is Op.MERGE, [places for _, places in found]
            yield self._owner.form.queued_decoder(self._bucket, memory, found[0][0], places, adds)

    def _pieces(self, ones: Sequence[Instruction]) -> tuple[list[Piece], list[int]]:
        """Return the pieces that instructions code, and the first byte of each payload."""
        pieces: list[Piece] = []
        places: list[int] = []
        for one in ones:
            slice_ = self._coded(one)
            assert slice_ is not None
            own = self._owner.layout.pieces(slice_)
            places += self._places(slice_, own)
            pieces += own
        return pieces, places

    def _places(self, slice_: Slice, pieces: Sequence[Piece]) -> Iterator[int]:
        start = self._owner.layout.place(slice_).start + self._moved[slice_.buffer]
        for piece in pieces:
            yield start
            start += _aligned(self._owner.layout.payload_nbytes(piece))

    def _dense(self, one: Instruction) -> Work:
        out, other = self._bytes(one.write), self._bytes(one.read)
        if one.op is Op.COPY:
            return partial(_copy, out, other)
        return partial(_add, out.view(torch.float32), other.view(torch.float32))

    def _bytes(self, slice_: Slice | None) -> torch.Tensor:
        assert slice_ is not None
        place = self._owner.layout.place(slice_)
        if place.in_data:
            return self._own_bytes[place.start : place.stop]
        memory, moved = self._own_bytes if slice_.buffer in self._lent else self._memory, self._moved[slice_.buffer]
        return memory[place.start + moved : place.stop + moved]


class _Outcome:
    """What a run reports to the host, which looks when the bucket comes again."""

    def __init__(self, look: Look, mark: Mark) -> None:
        self._look, self._mark, self._is_open = look, mark, False

    def ask(self) -> None:
        """Queue the report, behind everything else."""
        self._look.start()
        self._mark.set()
        self._is_open = True

    def settle(self) -> None:
        """Wait for the report, where there is one, and tell what it says."""
        if self._is_open:
            self._is_open = False
            self._mark.wait()
            self._look.finish()


def _is_in(slice_: Slice | None, buffers: Collection[str]) -> bool:
    return slice_ is not None and slice_.buffer in buffers


def _with_seed(encode: Callable[[int], None], seed: Sequence[int]) -> None:
    encode(seed[0])


def _each(works: Sequence[Work]) -> None:
    for work in works:
        work()


def _copy(out: torch.Tensor, other: torch.Tensor) -> None:
    out.copy_(other)


def _add(out: torch.Tensor, other: torch.Tensor) -> None:
    out.add_(other)
