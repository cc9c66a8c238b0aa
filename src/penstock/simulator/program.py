"""Times a program: the second reader of the same instructions that `verify` proves and the runtime runs.

The network is alpha-beta-gamma with full-duplex links: a NIC sends one message and receives one message at a time,
a message of M bytes holds both NICs for `alpha + beta M` seconds, and merging M bytes takes `gamma M` of the rank's
processor. Copies are free.

Ranks of one machine share its cores, where the network says how many there are. What was measured while all of them
computed (summing, codecs) has their waiting for one another in it, which is taken out: here they wait again.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field

from penstock.network import Network
from penstock.program import Instruction, Op, Program, Slice
from penstock.simulator.engine import Task, run_tasks
from penstock.timeline import Span, Timeline

ENGINE = "engine"  # of a rank: the thread of the transport, which moves bytes while others compute
CodecSeconds = Callable[[Op, float], float]  # (ENCODE, DECODE, or MERGE of two encoded blocks; dense bytes) -> seconds


@dataclass(frozen=True, slots=True)
class CodecCost:
    """What a codec does to sizes and times, as far as a program's clock needs to know."""

    ratio: float = 1.0  # encoded bytes / dense bytes
    seconds: CodecSeconds = field(default=lambda op, nbytes: 0.0)


@dataclass(frozen=True, slots=True)
class Overhead:
    """What a route was measured to take beside bytes on the wire and its codec's work on them."""

    core_seconds: float  # of a core: each message, at its receiver, and each computation
    latency_seconds: float  # of each message, during which nothing is held: another one may be under way
    factor: float = 1.0  # of computations, beside what the codec's curves say
    moving_seconds: float = 0.0  # of a core at a message's receiver while it is on the wire: the engine's thread


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
    for task, ran, head in zip(tasks, run_tasks(tasks, pools(network, program.world_size)), heads, strict=True):
        if task.seconds or task.uses:
            name, lane, rank = translation.name(head)
            spans.append(Span(name, lane, ran.start_seconds, ran.end_seconds, rank))
    timeline = Timeline(tuple(spans))
    return ProgramTiming(timeline.iteration_seconds, timeline)


def program_seconds(
    program: Program,
    network: Network,
    itemsize: float = 4,
    codec: CodecCost | None = None,
    overhead: Overhead | None = None,
) -> float:
    """Return only how long `program` takes: a picture of a large one takes longer than its timing."""
    translation = Translation(program, network, itemsize, codec or CodecCost(), None, overhead)
    ran = run_tasks(translation.tasks()[0], pools(network, program.world_size))
    return max((each.end_seconds for each in ran), default=0.0)


def pools(network: Network, world_size: int) -> dict[Hashable, float]:
    """Return the cores of each machine, where the network says how many there are."""
    machines = {machine(network, rank) for rank in range(world_size)} if network.cores else set()
    return {each: float(network.cores) for each in machines}


def machine(network: Network, rank: int) -> Hashable:
    """Return the machine that a rank is on."""
    return "machine", rank // network.ranks_per_machine


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
    overhead: Overhead | None = None  # as measured; None: a message's startup holds both NICs, and nothing else counts
    previous: dict[Key, Key] = field(default_factory=dict)  # of a send: the one before it on the same link
    encoded: frozenset[str] = field(init=False)  # buffers that hold a codec's output

    def __post_init__(self) -> None:
        self.encoded = frozenset(buffer.name for buffer in self.program.buffers if buffer.encoded)

    def tasks(self) -> tuple[list[Task], list[Key]]:
        """Return tasks in the order a rank-by-rank, step-by-step reading meets them, and the first of each."""
        tasks, members = self.tasks_and_keys()
        return tasks, [keys[0] for keys in members]

    def tasks_and_keys(self) -> tuple[list[Task], list[list[Key]]]:
        """Return the same tasks, and all instructions of each; a message with an overhead is several in a row."""
        owner = self._group()
        order = sorted(owner, key=lambda key: (key[1], key[0]))
        members: dict[Key, list[Key]] = {}
        for key in order:
            members.setdefault(owner[key], []).append(key)
        last_of: dict[Key, int] = {}  # of each group, the task that ends it
        place = -1
        for head in members:
            place += self._count(head)
            last_of[head] = place
        tasks, keys_of = list[Task](), list[list[Key]]()
        for keys in members.values():
            for task in self._tasks(keys, owner, last_of, len(tasks)):
                tasks.append(task)
                keys_of.append(keys)
        return tasks, keys_of

    def _count(self, head: Key) -> int:
        """Return how many tasks an instruction becomes."""
        return 4 if self.overhead is not None and self._at(*head).op is Op.SEND else 1

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

    def _tasks(
        self, keys: list[Key], owner: Mapping[Key, Key], last_of: Mapping[Key, int], place: int
    ) -> Iterator[Task]:
        """Yield the tasks of one instruction, the first of which is number `place`."""
        waits = {last_of[owner[rank, earlier]] for rank, index in keys for earlier in self._at(rank, index).after}
        later = 0 if self.overhead is None else 2  # tasks after the one on the wire: its latency holds nothing up
        waits |= {last_of[before] - later for key in keys if (before := self.previous.get(key))}
        after, (rank, index) = tuple(sorted(waits)), keys[0]
        one, on = self._at(rank, index), machine(self.network, rank)
        if any(self._at(*key).op is Op.SEND for key in keys):
            source, target = next(((r, self._at(r, i).peer) for r, i in keys if self._at(r, i).op is Op.SEND))
            assert target is not None
            there = machine(self.network, target)
            if self.overhead is not None:
                yield Task(self.overhead.moving_seconds, ((ENGINE, target),), after, there)
            yield Task(self._message_seconds(keys), (("out", source), ("in", target)), after)
            if self.overhead is not None:
                yield Task(self.overhead.latency_seconds, (), (place, place + 1))
                yield Task(self.overhead.core_seconds, (), (place + 2,), there)
        elif one.op is Op.NATIVE:
            yield Task(self._native(one), tuple(("cpu", r) for r, _ in keys), after)
        else:
            seconds = self._compute_seconds(one)
            if self.overhead is not None:
                seconds = self.overhead.factor * seconds + self.overhead.core_seconds
            yield Task(seconds, (("cpu", rank),) if seconds else (), after, on)

    def _message_seconds(self, keys: list[Key]) -> float:
        read = next(self._at(*key).read for key in keys if self._at(*key).op is Op.SEND)
        assert read is not None
        if self.overhead is not None:
            return self.network.beta_seconds_per_byte * self._nbytes(read)
        return self.network.link.seconds(self._nbytes(read))

    def _native(self, instruction: Instruction) -> float:
        assert instruction.write is not None
        assert self.native_seconds is not None, "a native program needs native_seconds"
        return self.native_seconds(self._nbytes(instruction.write))

    def _compute_seconds(self, instruction: Instruction) -> float:
        """Return what a computation takes by itself."""
        return self._measured_seconds(instruction) / self.network.ranks_per_core

    def _measured_seconds(self, instruction: Instruction) -> float:
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
