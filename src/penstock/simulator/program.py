"""Times a program: the second reader of the same instructions that `verify` proves and the runtime runs.

The network is alpha-beta-gamma with full-duplex links: a NIC sends one message and receives one message at a time,
a message of M bytes holds both NICs for `alpha + beta M` seconds, and merging M bytes takes `gamma M` of the rank's
processor. Copies are free.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.network import Network
from penstock.program import Instruction, Op, Program, Slice
from penstock.simulator.engine import Task, run_tasks
from penstock.timeline import Span, Timeline

CodecSeconds = Callable[[Op, float], float]  # (ENCODE, DECODE, or MERGE of two encoded blocks; dense bytes) -> seconds


@dataclass(frozen=True, slots=True)
class CodecCost:
    """What a codec does to sizes and times, as far as a program's clock needs to know."""

    ratio: float = 1.0  # encoded bytes / dense bytes
    seconds: CodecSeconds = field(default=lambda op, nbytes: 0.0)


@dataclass(frozen=True, slots=True)
class ProgramTiming:
    """How long a program takes and when each message travels."""

    seconds: float
    timeline: Timeline


def simulate_program(
    program: Program,
    network: Network,
    itemsize: int = 4,
    *,
    codec: CodecCost | None = None,
    native_seconds: Callable[[float], float] | None = None,
) -> ProgramTiming:
    """Time `program` on `network`; `itemsize` is the bytes of one element.

    `native_seconds` gives the time of the engine's own collective for a number of bytes; without it a program with a
    NATIVE instruction cannot be timed.
    """
    translation = Translation(program, network, itemsize, codec or CodecCost(), native_seconds)
    tasks, heads = translation.tasks()
    spans = []
    for task, ran, head in zip(tasks, run_tasks(tasks), heads, strict=True):
        if task.seconds or task.uses:
            name, lane, rank = translation.name(head)
            spans.append(Span(name, lane, ran.start_seconds, ran.end_seconds, rank))
    timeline = Timeline(tuple(spans))
    return ProgramTiming(timeline.iteration_seconds, timeline)


def program_seconds(program: Program, network: Network, itemsize: float = 4, codec: CodecCost | None = None) -> float:
    """Return only how long `program` takes: a picture of a large one takes longer than its timing."""
    translation = Translation(program, network, itemsize, codec or CodecCost(), None)
    return max((ran.end_seconds for ran in run_tasks(translation.tasks()[0])), default=0.0)


def count_steps(program: Program) -> int:
    """Count time steps when a message takes one step and everything else none, as Wang et al. do in Fig. 2."""
    unit = Network(workers=program.world_size, alpha_seconds=1.0, beta_seconds_per_byte=0.0, gamma_seconds_per_byte=0.0)
    return round(simulate_program(program, unit, native_seconds=lambda nbytes: 1.0).seconds)


Key = tuple[int, int]  # (rank, instruction index)


@dataclass(slots=True)
class Translation:
    """Turns instructions into tasks: a send and its recv become one message."""

    program: Program
    network: Network
    itemsize: float
    codec: CodecCost
    native_seconds: Callable[[float], float] | None
    previous: dict[Key, Key] = field(default_factory=dict)  # of a send: the one before it on the same link
    encoded: frozenset[str] = field(init=False)  # buffers that hold a codec's output

    def __post_init__(self) -> None:
        self.encoded = frozenset(buffer.name for buffer in self.program.buffers if buffer.encoded)

    def tasks(self) -> tuple[list[Task], list[Key]]:
        """Return tasks in the order a rank-by-rank, step-by-step reading meets them, and the first of each."""
        tasks, members = self.tasks_and_keys()
        return tasks, [keys[0] for keys in members]

    def tasks_and_keys(self) -> tuple[list[Task], list[list[Key]]]:
        """Return the same tasks, and all instructions of each."""
        owner = self._group()
        order = sorted(owner, key=lambda key: (key[1], key[0]))
        index_of: dict[Key, int] = {}
        members: list[list[Key]] = []
        for key in order:
            head = owner[key]
            if head not in index_of:
                index_of[head] = len(members)
                members.append([])
            members[index_of[head]].append(key)
        return [self._task(keys, owner, index_of) for keys in members], members

    def _group(self) -> dict[Key, Key]:
        """Map each instruction to the head of its group: a recv to its send, all natives to rank 0's."""
        sends: defaultdict[tuple[int, int], deque[Key]] = defaultdict(deque)
        natives: defaultdict[int, list[Key]] = defaultdict(list)
        owner: dict[Key, Key] = {}
        for rank, instructions in enumerate(self.program.ranks):
            for index, instruction in enumerate(instructions):
                owner[rank, index] = (rank, index)
                if instruction.op is Op.SEND and instruction.peer is not None:
                    queue = sends[rank, instruction.peer]
                    if queue:  # a link keeps its messages in order
                        self.previous[rank, index] = queue[-1]
                    queue.append((rank, index))
                if instruction.op is Op.NATIVE:
                    natives[rank].append((rank, index))
        for rank, instructions in enumerate(self.program.ranks):
            for index, instruction in enumerate(instructions):
                if instruction.op is Op.RECV and instruction.peer is not None:
                    owner[rank, index] = sends[instruction.peer, rank].popleft()
            for count, key in enumerate(natives[rank]):
                owner[key] = natives[0][count]
        return owner

    def _task(self, keys: list[Key], owner: Mapping[Key, Key], index_of: Mapping[Key, int]) -> Task:
        after = {index_of[owner[rank, earlier]] for rank, index in keys for earlier in self._at(rank, index).after}
        after |= {index_of[previous] for key in keys if (previous := self.previous.get(key))}
        rank, index = keys[0]
        if any(self._at(*key).op is Op.SEND for key in keys):
            source, target = next(((r, self._at(r, i).peer) for r, i in keys if self._at(r, i).op is Op.SEND))
            assert target is not None
            return Task(self._message_seconds(keys), (("out", source), ("in", target)), tuple(sorted(after)))
        if self._at(rank, index).op is Op.NATIVE:
            return Task(self._native(self._at(rank, index)), tuple(("cpu", r) for r, _ in keys), tuple(sorted(after)))
        seconds = self._compute_seconds(self._at(rank, index))
        return Task(seconds, (("cpu", rank),) if seconds else (), tuple(sorted(after)))

    def _message_seconds(self, keys: list[Key]) -> float:
        read = next(self._at(*key).read for key in keys if self._at(*key).op is Op.SEND)
        assert read is not None
        return self.network.link.seconds(self._nbytes(read))

    def _native(self, instruction: Instruction) -> float:
        assert instruction.write is not None
        assert self.native_seconds is not None, "a native program needs native_seconds"
        return self.native_seconds(self._nbytes(instruction.write))

    def _compute_seconds(self, instruction: Instruction) -> float:
        assert instruction.write is not None
        assert instruction.read is not None
        dense = instruction.write.numel * self.itemsize
        if instruction.op is Op.MERGE and instruction.write.buffer in self.encoded:
            return self.codec.seconds(Op.MERGE, dense)
        if instruction.op is Op.MERGE:
            encoded = instruction.read.buffer in self.encoded
            decoding = self.codec.seconds(Op.DECODE, dense) if encoded else 0.0
            return self.network.gamma_seconds_per_byte * dense + decoding
        return self.codec.seconds(instruction.op, dense) if instruction.op in (Op.ENCODE, Op.DECODE) else 0.0

    def _nbytes(self, touched: Slice) -> float:
        ratio = self.codec.ratio if touched.buffer in self.encoded else 1.0
        return touched.numel * self.itemsize * ratio

    def _at(self, rank: int, index: int) -> Instruction:
        return self.program.ranks[rank][index]

    def name(self, key: Key) -> tuple[str, str, int]:
        """Return what a span says, its lane and its rank."""
        instruction = self._at(*key)
        lane = "network" if instruction.op in (Op.SEND, Op.RECV) else "codec" if instruction.op in _CODEC else "merge"
        return str(instruction).split(" (")[0], lane, key[0]


_CODEC = (Op.ENCODE, Op.DECODE)
