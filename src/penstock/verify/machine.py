"""The fourth stage of a proof: run the program on symbols, in time steps.

Every rank issues its instructions in list order, each once what it waits for is finished. A message needs both ends
issued; then it takes one step, in which a rank sends at most one message and receives at most one. Computing takes no
time. Messages are matched beforehand and no two accesses race, so every order of events gives the same values: one
run proves all. The steps are those of Wang et al., Fig. 2.

A composition runs as its joined program, with one list for each of a rank's lanes. Its pieces, buckets or halves of
them, become ready as late as they can: the next one when nothing moves any more, and by then all before it must be
finished. To be ready earlier lets instructions be issued earlier, and what is issued and finished only grows: if this
run ends, all do.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.program import Op, Program, Slice
from penstock.program.composition import Composition
from penstock.verify.arithmetic import Arithmetic
from penstock.verify.findings import Finding, Kind, blame
from penstock.verify.matching import Key, Matching
from penstock.verify.memory import Expressions, Memory, Piece, place

_TAKES_TIME = (Op.SEND, Op.RECV, Op.NATIVE)


@dataclass(frozen=True, slots=True)
class Carried:
    """One message and the step in which it travelled."""

    step: int  # the first is 1
    source: int
    target: int
    read: Slice  # of the source
    write: Slice  # of the target
    elements: tuple[int, int]  # start and stop of the data elements it carries
    contributors: int  # bit set of the ranks whose data is in every element of it


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a run."""

    steps: int
    carried: tuple[Carried, ...]
    memories: tuple[Memory, ...]
    arithmetic: Arithmetic
    issued: dict[Key, int]  # the step in which each instruction was due; computing belongs to the step before it
    findings: tuple[Finding, ...]

    def dated(self, finding: Finding) -> Finding:
        """Return the finding with the step in which its instruction was due, where that is known and missing."""
        if finding.step is not None or finding.index is None or (finding.rank, finding.index) not in self.issued:
            return finding
        return replace(finding, step=self.issued[finding.rank, finding.index])


def run_program(program: Program, matching: Matching, composition: Composition | None = None) -> Run:
    """Run a well-formed program, perhaps joined from a composition, on symbols, as far as its messages are matched."""
    return _Machine(program, matching, composition).run()


class _Machine:
    """The state of one run."""

    def __init__(self, program: Program, matching: Matching, composition: Composition | None) -> None:
        self.program, self.matching = program, matching
        sizes = tuple(len(rank) for rank in program.ranks)
        self.ends = (sizes,) if composition is None else composition.ends()
        self.ready_buckets = 1  # their instructions may be issued
        self.late: list[Finding] = []  # of buckets that wait for the readiness of later ones
        expressions = Expressions()
        self.memories = tuple(Memory(program, rank, expressions) for rank in range(program.world_size))
        self.arithmetic = Arithmetic(program, expressions, self.memories)
        lane_of = (0,) if composition is None else composition.lanes
        self.lanes = [_lanes(rank, self.ends, lane_of) for rank in range(program.world_size)]
        self.finished = [bytearray(len(rank)) for rank in program.ranks]
        self.issued: dict[Key, int] = {}  # the step in which each was due
        self.ready: list[Key] = []  # sends whose recv is issued too, the oldest first
        self.newly_ready: list[Key] = []
        self.native_calls = 0
        self.step = 0
        self.carried: list[Carried] = []

    def run(self) -> Run:
        """Take steps until nothing moves."""
        woken: Iterable[int] = range(self.program.world_size)
        while True:
            for rank in woken:
                self._issue(rank)
            self.ready += sorted(self.newly_ready, key=lambda send: (send[1], send[0]))  # as the ranks list them
            self.newly_ready = []
            if self.ready:
                self.step += 1
                woken = sorted({rank for send in self._choose() for rank in self._carry(send)})
            elif self._native_is_ready():
                self.step += 1
                woken = self._call_native()
            elif self.ready_buckets < len(self.ends):
                self.late = self.late or self._deadlock()
                self.ready_buckets += 1
                woken = range(self.program.world_size)
            else:
                break
        findings = (*self.arithmetic.findings, *(self.late or self._deadlock()))
        return Run(self.step, tuple(self.carried), self.memories, self.arithmetic, self.issued, findings)

    def _issue(self, rank: int) -> None:
        """Issue the rank's instructions up to the first that has to wait, in each lane."""
        for lane in self.lanes[rank]:
            self._issue_lane(rank, lane)

    def _issue_lane(self, rank: int, lane: "deque[int]") -> None:
        instructions, finished = self.program.ranks[rank], self.finished[rank]
        limit = self.ends[self.ready_buckets - 1][rank]
        while lane and lane[0] < limit:
            index = lane[0]
            instruction = instructions[index]
            if not all(finished[earlier] for earlier in instruction.after):
                return
            lane.popleft()
            self.issued[rank, index] = self.step + (instruction.op in _TAKES_TIME)
            if instruction.op is Op.SEND and self.matching.recv_of.get((rank, index)) in self.issued:
                self.newly_ready.append((rank, index))
            elif instruction.op is Op.RECV and self.matching.send_of.get((rank, index)) in self.issued:
                self.newly_ready.append(self.matching.send_of[rank, index])
            elif instruction.op not in _TAKES_TIME:
                self.arithmetic.compute(rank, index, self.step)
                finished[index] = True

    def _choose(self) -> list[Key]:
        """Take the messages that travel next: the oldest first, one out and one in per rank."""
        sending: set[int] = set()
        receiving: set[int] = set()
        chosen, kept = [], []
        for send in self.ready:
            source, target = send[0], self.matching.recv_of[send][0]
            if source in sending or target in receiving:
                kept.append(send)
                continue
            sending.add(source)
            receiving.add(target)
            chosen.append(send)
        self.ready = kept
        return chosen

    def _carry(self, send: Key) -> tuple[int, int]:
        """Deliver one message; return the two ranks."""
        (source, index), (target, arrival) = send, self.matching.recv_of[send]
        read, write = self.program.ranks[source][index].read, self.program.ranks[target][arrival].write
        assert read is not None
        assert write is not None
        pieces = self.arithmetic.read(source, index, read, self.step)
        self.arithmetic.store(target, arrival, write, place(pieces, read, write, arrival), self.step)
        elements, contributors = _origin(pieces, read), self.arithmetic.common_contributors(pieces)
        self.carried.append(Carried(self.step, source, target, read, write, elements, contributors))
        self.finished[source][index] = self.finished[target][arrival] = True
        return source, target

    def _native_is_ready(self) -> bool:
        calls = self.matching.natives
        return self.native_calls < len(calls) and all(key in self.issued for key in calls[self.native_calls])

    def _call_native(self) -> range:
        for rank, index in self.matching.natives[self.native_calls]:
            self.finished[rank][index] = True
        self.arithmetic.native(self.matching.natives[self.native_calls], self.step)
        self.native_calls += 1
        return range(self.program.world_size)

    def _deadlock(self) -> list[Finding]:
        """Name the ranks that wait for one another in a circle, if what is ready did not finish."""
        limits = self.ends[self.ready_buckets - 1]
        places = {rank: done.find(0, 0, limits[rank]) for rank, done in enumerate(self.finished)}
        stuck = {rank: place for rank, place in places.items() if place >= 0}
        if not stuck:
            return []
        path = [min(stuck)]
        while (following := self._waits_for(path[-1], stuck[path[-1]])) not in path:
            if following not in stuck:
                return []  # an unmatched message, which is a finding of its own
            path.append(following)
        circle = path[path.index(following) :]
        rank = circle[0]
        words = " -> ".join(str(one) for one in (*circle, rank))
        detail = f"is never finished; ranks wait for one another: {words}"
        return [blame(self.program, Kind.DEADLOCK, rank, stuck[rank], detail, self.step)]

    def _waits_for(self, rank: int, index: int) -> int:
        """Return the rank that a stuck rank's first unfinished instruction waits for; -1 for an unmatched call."""
        instruction = self.program.ranks[rank][index]
        if instruction.peer is not None:
            return instruction.peer
        calls = next((calls for calls in self.matching.natives if (rank, index) in calls), [(rank, index)])
        return next((other for other, call in calls if (other, call) not in self.issued), -1)


def _lanes(rank: int, ends: Sequence[Sequence[int]], lane_of: Sequence[int]) -> list[deque[int]]:
    """Return the instructions of each lane of a rank, in order."""
    found: list[deque[int]] = [deque() for _ in range(max(lane_of) + 1)]
    start = 0
    for bucket, lane in zip(ends, lane_of, strict=True):
        found[lane].extend(range(start, bucket[rank]))
        start = bucket[rank]
    return found


def _origin(pieces: Iterable[Piece], read: Slice) -> tuple[int, int]:
    """Return which elements of the data the pieces belong to; the slice itself if some hold nothing."""
    origins = [(start + value.shift, stop + value.shift) for start, stop, value in pieces if value is not None]
    if not origins:
        return read.start, read.stop
    return min(start for start, _ in origins), max(stop for _, stop in origins)
