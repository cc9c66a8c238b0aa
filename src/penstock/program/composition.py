"""A `Composition`: the programs of an iteration's buckets, in the order in which buckets become ready.

Programs are dealt out to lanes in that order, the same on all ranks. A lane carries its programs out one after the
other, each once its gradients are ready; lanes go on independently of each other. All of a rank's lanes share one
processor, which computes for one of them at a time, and one NIC. Calls of the engine's own collectives must come in one
order on all ranks, so programs with `native` are all in lane 0.

    three buckets, two lanes             ready at 1, 2 and 3

    lane 0   |1 1 1|3 3 3|               3 waits for 1, which is before it in its lane, and for its gradients
    lane 1     |2 2 2|                   2 waits for its gradients only

In halves (`in_halves`) a lane carries out the first half of each of its programs in that order, then the second
half of each in the opposite order, as the next forward pass needs them. All first halves on a rank are ready before the
first second half is; a bucket's two halves are in one lane.

    lane 0   |1 |3 |3 |1 |
    lane 1     |2 |2 |

Readers: `verify` proves it for any moments of readiness, `simulator.composition` times it, `exchange` runs it.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle
from typing import NamedTuple

from penstock.program import DATA, Buffer, Instruction, Op, Part, Program, Slice, join

LANES = 4  # programs under way at a time
NATIVE_LANE = 0  # of all programs that call the engine's own collectives


class Piece(NamedTuple):
    """What a lane carries out at a time: a program, or a half of one (`in_halves`)."""

    number: int  # of the program
    starts: tuple[int, ...]  # the first instruction, of each rank
    stops: tuple[int, ...]

    @property
    def is_second(self) -> bool:
        """Whether it is the second half of a program."""
        return any(self.starts)


@dataclass(frozen=True, slots=True)
class Composition:
    """The programs of one iteration; make it with `compose`."""

    programs: tuple[Program, ...]  # all of the same collective and number of ranks, as buckets become ready
    lane_of: tuple[int, ...]  # of each program
    halfway: tuple[tuple[int, ...], ...] = ()  # of each program and rank: instructions of its first half; (): whole

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.programs[0].world_size

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What lanes carry out, in order: whole programs, or all first halves, then second ones, the last's first."""
        zeros, sizes = (0,) * self.world_size, [tuple(map(len, program.ranks)) for program in self.programs]
        stops = self.halfway or sizes
        pieces = [Piece(number, zeros, stops[number]) for number in range(len(sizes))]
        if self.halfway:
            pieces += [Piece(number, stops[number], sizes[number]) for number in reversed(range(len(sizes)))]
        return tuple(pieces)

    @property
    def lanes(self) -> tuple[int, ...]:
        """The lane of each piece."""
        return tuple(self.lane_of[piece.number] for piece in self.pieces)

    def before(self, place: int) -> int | None:
        """Return the piece that comes before another in its lane; None for the first."""
        lanes = self.lanes
        return next((each for each in reversed(range(place)) if lanes[each] == lanes[place]), None)

    def joined(self) -> Program:
        """Return one program on the data of all buckets, one behind the other; `ends` says where each piece stops.

        The first instruction of a piece also waits for all of the piece before it in its lane.
        """
        first, starts = self.programs[0], (0, *accumulate(program.numel for program in self.programs))
        ranks: list[list[Instruction]] = [[] for _ in range(self.world_size)]
        places: list[list[list[int]]] = [[[] for _ in ranks] for _ in self.programs]  # of instructions, in `ranks`
        for place, (number, begin, end) in enumerate(self.pieces):
            encoded = {each.name for each in self.programs[number].buffers if each.encoded}
            for rank, instructions in enumerate(self.programs[number].ranks):
                waits, here = self._instructions_before(place, rank, places), places[number][rank]
                for one in instructions[begin[rank] : end[rank]]:
                    here.append(len(ranks[rank]))
                    write, read = (_moved(each, number, starts[number], encoded) for each in (one.write, one.read))
                    after = tuple(sorted({*waits, *(here[index] for index in one.after)}))
                    ranks[rank].append(one._replace(write=write, read=read, after=after))
                    waits = ()
        buffers = [
            Buffer(_name(number, each.name), each.numel + each.encoded * starts[number], each.encoded)
            for number, program in enumerate(self.programs)
            for each in program.buffers
        ]
        named = f"{len(self.programs)} buckets"
        whole = tuple(tuple(each) for each in ranks)
        return Program(named, first.collective, self.world_size, starts[-1], whole, tuple(buffers), first.root)

    def _instructions_before(self, place: int, rank: int, places: Sequence[Sequence[Sequence[int]]]) -> Sequence[int]:
        """Return what a rank does last in the lane of a piece before it: nothing may be left of it."""
        pieces, earlier = self.pieces, self.before(place)
        while earlier is not None:
            number, begin, end = pieces[earlier]
            if found := places[number][rank][begin[rank] : end[rank]]:
                return found
            earlier = self.before(earlier)  # it does nothing in that one
        return ()

    def ends(self) -> tuple[tuple[int, ...], ...]:
        """Return, by piece, where its instructions stop on each rank of the joined program."""
        sizes = [[stop - start for start, stop in zip(*piece[1:], strict=True)] for piece in self.pieces]
        return tuple(zip(*(accumulate(rank) for rank in zip(*sizes, strict=True)), strict=True))


def in_halves(part: Part) -> tuple[Part, int]:
    """Return a part with its first half first, and how many instructions that has.

    First partial sums travel and are added up, then finished sums go to all ranks. A rank issues everything of the
    first half before anything of the second. What a program waits for only to keep its pace (a send that waits for the
    one before it, though that is of the other half) does not hold the first half up. Which messages carry finished sums
    both their ends know (`Part.finished`), so each rank cuts its own part and all parts agree; strategies that pass no
    finished sums on, as `recursive_doubling`, have no second half.

        ring on 3 ranks, rank 0   recv c2, send a0, merge, recv b12, send c02, merge | send B, recv A, send A, recv C
    """
    later: set[int] = set()
    for index, one in enumerate(part.instructions):
        if index in part.finished or (
            one.op not in (Op.SEND, Op.RECV) and any(earlier in later for earlier in one.after)
        ):
            later.add(index)  # a message of a finished sum, or what computes with one
    count = len(part.instructions)
    order = sorted(range(count), key=lambda index: (index in later, index))
    places = {old: new for new, old in enumerate(order)}
    instructions = []
    for new, old in enumerate(order):
        one = part.instructions[old]
        after = tuple(sorted(places[earlier] for earlier in one.after if places[earlier] < new))
        instructions.append(one._replace(after=after))
    finished = frozenset(places[index] for index in part.finished)
    return replace(part, instructions=tuple(instructions), finished=finished), count - len(later)


def whole_in_halves(parts: Sequence[Part]) -> tuple[Program, tuple[int, ...]]:
    """Return the program of all ranks' parts, cut, and how many instructions the first half has on each of them."""
    cut = [in_halves(part) for part in parts]
    return join([part for part, _ in cut]), tuple(count for _, count in cut)


def compose(programs: Sequence[Program], lanes: int, halfway: Sequence[tuple[int, ...]] = ()) -> Composition:
    """Deal programs out to lanes; all of them must be of one collective and for the same ranks.

    `halfway`: of programs that are cut, how many instructions the first half of each has on each rank.
    """
    assert len({(each.collective, each.world_size, each.root) for each in programs}) == 1
    natives = [any(one.op is Op.NATIVE for rank in program.ranks for one in rank) for program in programs]
    return Composition(tuple(programs), deal(natives, lanes), tuple(halfway))


def in_turn(lanes: int) -> Iterator[int]:
    """Return the lanes of programs as they are started; one that calls the engine's own collectives takes none."""
    return cycle(range(lanes))


def deal(natives: Iterable[bool], lanes: int) -> tuple[int, ...]:
    """Return the lanes of programs, given which of them call the engine's own collectives.

    >>> deal([False, False, True, False, False], 3)
    (0, 1, 0, 2, 0)
    """
    turn = in_turn(lanes)
    return tuple(NATIVE_LANE if is_native else next(turn) for is_native in natives)


def _name(number: int, buffer: str) -> str:
    return f"{number}.{buffer}"


def _moved(slice_: Slice | None, number: int, start: int, encoded: Collection[str]) -> Slice | None:
    """Return where a slice of a bucket's program lies in the joined one; encoded ones lie as their elements do."""
    if slice_ is None:
        return None
    shift = start if slice_.buffer == DATA or slice_.buffer in encoded else 0
    name = DATA if slice_.buffer == DATA else _name(number, slice_.buffer)
    return Slice(name, slice_.start + shift, slice_.stop + shift)
