"""A program in rounds: messages that start together on all ranks, then the computations they allow.

For engines such as NCCL, whose messages run on the device in the order they were issued: two ranks that first send to
and then receive from each other would wait in a circle, unless both messages are issued as one group. A round is such
a group, and rounds are the same on all ranks: a message is in the first round in which both of its ends have what
they wait for. So a group waits only for groups of the same round, and whatever a rank issued before is in earlier
rounds, which by induction end. At most one message of each pair and direction is in a round.

All ranks have equally many rounds, some with nothing to do. So rounds of several programs can be issued as one group,
and what is in one group on one rank is in one group on every other.

    ring on 3 ranks:   round 1: every rank sends one chunk and receives one; merge; round 2: the same; ...
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.errors import StrategyError
from penstock.program import Op, Program
from penstock.program.builder import ProgramBuilder


@dataclass(frozen=True, slots=True)
class Round:
    """What one rank does in one round; numbers are its instructions."""

    messages: tuple[int, ...]  # sends and receives, issued as one group
    computations: tuple[int, ...]  # then these, in order


def widen(program: Program) -> Program:
    """Return the same instructions, each waiting only for those whose slices it touches.

    Strategies let messages leave in turn, so that a NIC carries one at a time. Where a group of messages costs about
    what one does, more of them in a round is better: a parameter server takes two rounds then, not 2 (N - 1).
    """
    builder = ProgramBuilder(program.strategy, program.collective, program.world_size, program.numel, program.root)
    for buffer in program.buffers:
        builder.scratch(buffer.name, buffer.numel, buffer.encoded)
    for rank, instructions in enumerate(program.ranks):
        for one in instructions:
            builder.add(rank, one)
    return builder.build()


def rounds(program: Program) -> tuple[tuple[Round, ...], ...]:
    """Return each rank's rounds, equally many; in some it does nothing."""
    state = _State(program)
    while state.advance():
        pass
    for rank, finished in enumerate(state.finished):
        for index, instruction in enumerate(program.ranks[rank]):
            if index not in finished:
                raise StrategyError(
                    f"{program.strategy}: rank {rank} never gets past instruction {index}: {instruction}; "
                    "ranks wait in a circle, or a native call is among the messages"
                )
    return tuple(tuple(done) for done in state.done)


class _State:
    """How far all ranks have come."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.finished: list[set[int]] = [set() for _ in program.ranks]
        self.done: list[list[Round]] = [[] for _ in program.ranks]
        self.links = _links(program)
        before = [*self._compute()]  # any message
        if any(before):
            self._note([() for _ in program.ranks], before)

    def advance(self) -> bool:
        """Play one round; say whether anything moved."""
        moving: list[list[int]] = [[] for _ in self.program.ranks]
        for (source, target), messages in self.links.items():
            if messages and self._ready(source, messages[-1][0]) and self._ready(target, messages[-1][1]):
                sent, received = messages.pop()
                moving[source].append(sent)
                moving[target].append(received)
        for rank, messages_of_rank in enumerate(moving):
            self.finished[rank].update(messages_of_rank)
        if any(moving):
            self._note(moving, [*self._compute()])
        return any(moving)

    def _note(self, moved: Sequence[Sequence[int]], computed: Sequence[tuple[int, ...]]) -> None:
        for rank, done in enumerate(self.done):
            done.append(Round(tuple(sorted(moved[rank])), computed[rank]))

    def _compute(self) -> Iterator[tuple[int, ...]]:
        """Finish and yield, for each rank, the computations that wait for nothing more."""
        for rank, instructions in enumerate(self.program.ranks):
            computed = []
            for index, instruction in enumerate(instructions):  # one pass: `after` points backwards
                waiting = instruction.op not in (Op.SEND, Op.RECV, Op.NATIVE) and index not in self.finished[rank]
                if waiting and self._ready(rank, index):
                    self.finished[rank].add(index)
                    computed.append(index)
            yield tuple(computed)

    def _ready(self, rank: int, index: int) -> bool:
        return all(earlier in self.finished[rank] for earlier in self.program.ranks[rank][index].after)


def _links(program: Program) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return the messages of each pair of ranks as (send, receive), the next one last."""
    sends: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    receives: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, instructions in enumerate(program.ranks):
        for index, instruction in enumerate(instructions):
            if instruction.op is Op.SEND and instruction.peer is not None:
                sends[rank, instruction.peer].append(index)
            elif instruction.op is Op.RECV and instruction.peer is not None:
                receives[instruction.peer, rank].append(index)
    return {link: list(zip(sends[link], receives[link], strict=True))[::-1] for link in sends}
