"""Times a program: the second reader of the same instructions that `verify` proves and the runtime runs.

The network is alpha-beta-gamma with full-duplex links: a NIC sends one message and receives one message at a time,
a message of M bytes holds both NICs for `alpha + beta M` seconds, and merging M bytes takes `gamma M` of the rank's
processor. Copies are free.

Ranks of one machine share its cores, where the network says how many there are. What was measured while all of them
computed (summing, codecs) has their waiting for one another in it, which is taken out: here they wait again.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

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
    steps: Sequence["Step"] = (),
) -> float:
    """Return only how long `program` takes: a picture of a large one takes longer than its timing.

    `steps`: of the program, where they are known.
    """
    translation = Translation(program, network, itemsize, codec or CodecCost(), None, overhead, steps)
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


_SEND, _RECV, _NATIVE = Op.SEND, Op.RECV, Op.NATIVE  # an attribute of an enum is looked up slowly
Key = tuple[int, int]  # (rank, instruction index)


class Step(NamedTuple):
    """What happens at a time: an instruction, or a send with its recv, or the natives of all ranks."""

    keys: tuple[Key, ...]  # the earliest first, as all ranks are read step by step
    one: Instruction  # a message's send, or the first
    source: int  # the rank that `one` is of
    after: tuple[int, ...]  # earlier steps that its instructions wait for
    link: int | None  # the message before this one: a link keeps its messages in order


def steps_of(program: Program) -> list[Step]:
    """Return the steps of a program in the order a rank-by-rank, step-by-step reading meets them."""
    together, links = _together(program)
    number: list[list[int]] = [[-1] * len(instructions) for instructions in program.ranks]  # of each instruction's step
    found: list[tuple[Key, ...]] = []
    for index in range(max(map(len, program.ranks), default=0)):
        for rank, numbers in enumerate(number):
            if index < len(numbers) and numbers[index] < 0:
                keys = together.get((rank, index)) or ((rank, index),)
                for other, place in keys:
                    number[other][place] = len(found)
                found.append(keys)
    steps = list[Step]()
    for keys in found:
        head = next((key for key in keys if _at(program, key).op is _SEND), keys[0])
        after = {number[rank][each] for rank, index in keys for each in program.ranks[rank][index].after}
        before = links.get(head)
        sent = None if before is None else number[before[0]][before[1]]
        steps.append(Step(keys, _at(program, head), head[0], tuple(after), sent))
    return steps


def _together(program: Program) -> tuple[dict[Key, tuple[Key, ...]], dict[Key, Key]]:
    """Return what makes up a message or native call, by each instruction of it, and for each send that before it."""
    sends, recvs = (defaultdict[tuple[int, int | None], list[Key]](list) for _ in range(2))
    natives: list[list[Key]] = [[] for _ in program.ranks]
    for rank, instructions in enumerate(program.ranks):
        for index, one in enumerate(instructions):
            if one.op is _SEND:
                sends[rank, one.peer].append((rank, index))
            elif one.op is _RECV and one.peer is not None:
                recvs[one.peer, rank].append((rank, index))
            elif one.op is _NATIVE:
                natives[rank].append((rank, index))
    assert all(len(keys) <= len(sends[link]) for link, keys in recvs.items()), "a recv has no send"
    messages = (pair for link, keys in recvs.items() for pair in zip(keys, sends[link], strict=False))
    ordered = [tuple(sorted(keys, key=_moment)) for keys in (*messages, *zip(*natives, strict=True))]
    links = {later: earlier for keys in sends.values() for earlier, later in pairwise(keys)}
    return {key: keys for keys in ordered for key in keys}, links


def _moment(key: Key) -> tuple[int, int]:
    return key[1], key[0]


def _at(program: Program, key: Key) -> Instruction:
    return program.ranks[key[0]][key[1]]


@dataclass(slots=True)
class Translation:
    """Turns instructions into tasks: a send and its recv become one message."""

    program: Program
    network: Network
    itemsize: float
    codec: CodecCost
    native_seconds: Callable[[float], float] | None
    overhead: Overhead | None = None  # as measured; None: a message's startup holds both NICs, and nothing else counts
    steps: Sequence[Step] = ()  # of `program`; (): to be found
    encoded: frozenset[str] = field(init=False)  # buffers that hold a codec's output
    _known: dict[tuple[Op, str, str, int], float] = field(init=False, default_factory=dict)  # most blocks are alike

    def __post_init__(self) -> None:
        self.encoded = frozenset(buffer.name for buffer in self.program.buffers if buffer.encoded)
        self.steps = self.steps or steps_of(self.program)

    def tasks(self) -> tuple[list[Task], list[Key]]:
        """Return tasks in the order of steps, and the first instruction of each."""
        tasks, members = self.tasks_and_keys()
        return tasks, [keys[0] for keys in members]

    def tasks_and_keys(self) -> tuple[list[Task], list[tuple[Key, ...]]]:
        """Return the same tasks, and all instructions of each; a message with an overhead is several in a row."""
        tasks, keys_of = list[Task](), list[tuple[Key, ...]]()
        later = 0 if self.overhead is None else 2  # tasks after the one on the wire: its latency holds nothing up
        ends = self._ends()
        for step in self.steps:
            waits = {ends[each] for each in step.after}
            if step.link is not None:
                waits.add(ends[step.link] - later)
            after = tuple(sorted(waits))
            if step.one.op is _SEND:
                self._message(step, after, tasks)
            else:
                tasks.append(self._own(step, after))
            keys_of += [step.keys] * (len(tasks) - len(keys_of))
        return tasks, keys_of

    def _ends(self) -> Sequence[int]:
        """Return, for each step, the task that ends it."""
        if self.overhead is None:
            return range(len(self.steps))
        return [count - 1 for count in accumulate(4 if step.one.op is _SEND else 1 for step in self.steps)]

    def _message(self, step: Step, after: tuple[int, ...], tasks: list[Task]) -> None:
        """Add the tasks of one message."""
        target, overhead = step.one.peer, self.overhead
        assert target is not None
        if overhead is None:
            tasks.append(Task(self._seconds(step.one), (("out", step.source), ("in", target)), after))
            return
        there, place = machine(self.network, target), len(tasks)
        tasks.append(Task(overhead.moving_seconds, ((ENGINE, target),), after, there))
        tasks.append(Task(self._seconds(step.one), (("out", step.source), ("in", target)), after))
        tasks.append(Task(overhead.latency_seconds, (), (place, place + 1)))
        tasks.append(Task(overhead.core_seconds, (), (place + 2,), there))

    def _own(self, step: Step, after: tuple[int, ...]) -> Task:
        """Return the task of a computation, or of a native of all ranks."""
        seconds = self._seconds(step.one)
        if step.one.op is _NATIVE:
            return Task(seconds, tuple([("cpu", rank) for rank, _ in step.keys]), after)
        if self.overhead is not None:
            seconds = self.overhead.factor * seconds + self.overhead.core_seconds
        return Task(seconds, (("cpu", step.source),) if seconds else (), after, machine(self.network, step.source))

    def _seconds(self, one: Instruction) -> float:
        """Return what an instruction takes by itself."""
        written, read = one.write, one.read
        numel = read.numel if read is not None else written.numel if written is not None else 0
        kind = one.op, written[0] if written is not None else "", read[0] if read is not None else "", numel
        if kind not in self._known:
            self._known[kind] = self._found_seconds(one)
        return self._known[kind]

    def _found_seconds(self, one: Instruction) -> float:
        if one.op is _SEND:
            return self._message_seconds(one)
        return self._native(one) if one.op is _NATIVE else self._compute_seconds(one)

    def _message_seconds(self, one: Instruction) -> float:
        assert one.read is not None
        if self.overhead is not None:
            return self.network.beta_seconds_per_byte * self._nbytes(one.read)
        return self.network.link.seconds(self._nbytes(one.read))

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

    def name(self, key: Key) -> tuple[str, str, int]:
        """Return what a span says, its lane and its rank."""
        instruction = _at(self.program, key)
        lane = "network" if instruction.op in (Op.SEND, Op.RECV) else "codec" if instruction.op in _CODEC else "merge"
        return str(instruction).split(" (")[0], lane, key[0]


_CODEC = (Op.ENCODE, Op.DECODE)
