"""In which order one thread starts, awaits and computes the instructions of a rank, decided before anything runs.

Engines differ in whether a message can be polled (gloo's cannot), so nothing is decided while messages fly: a
program becomes a fixed list of actions. Instructions keep their order, except that

- a receive is posted as soon as what it waits for is known to be finished, so that the peer's data find a place
  while this rank still computes: the receipt of a block overlaps the reduction of the one before;
- at most `window` sends and `window` receives are in flight: before one too many, the oldest is awaited.

The window could make a program wait in a circle that would be fine with unlimited buffers. `choose_window` plays
the actions of all ranks against each other under the strictest engine (no send ends before its receive is posted)
and widens the window until they come to an end. A circle that stays is the program's own.

    linear pipeline broadcast, middle rank, blocks A and B:   recv A, recv B, wait A, send A, wait B, send B, wait sends
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from enum import Enum
from heapq import heappop, heappush
from typing import NamedTuple

from penstock.errors import StrategyError
from penstock.program import Instruction, Op, Program


class Do(Enum):
    """What the executor does with an instruction."""

    SEND = "send"  # start it
    RECV = "recv"  # start it
    WAIT = "wait"  # until it is finished
    COMPUTE = "compute"  # merge, copy, encode, decode: finished when it returns
    NATIVE = "native"  # all ranks together


class Action(NamedTuple):
    """One step of a schedule: do this with the instruction at that index."""

    do: Do
    step: int  # the index of the instruction


_SEND, _RECV, _NATIVE = Op.SEND, Op.RECV, Op.NATIVE  # a name is found at once; a member of an Enum takes 0.3 us
_DO_SEND, _DO_RECV, _DO_WAIT, _DO_COMPUTE, _DO_NATIVE = Do.SEND, Do.RECV, Do.WAIT, Do.COMPUTE, Do.NATIVE
_new = tuple.__new__  # without the names of the fields: a schedule has thousands of actions


def schedule(instructions: Sequence[Instruction], window: int) -> tuple[Action, ...]:
    """Return the actions of one rank, with at most `window` sends and `window` receives in flight."""
    return _Scheduler(instructions, window).run()


def schedule_in_halves(
    instructions: Sequence[Instruction], halfway: int, window: int
) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
    """Return the actions of each half of a part that is cut (`in_halves`): nothing is in flight between."""
    second = [
        one._replace(after=tuple(earlier - halfway for earlier in one.after if earlier >= halfway))
        for one in instructions[halfway:]
    ]
    later = tuple(Action(do, halfway + step) for do, step in schedule(second, window))
    return schedule(instructions[:halfway], window), later


class _Scheduler:
    """A schedule under construction."""

    def __init__(self, instructions: Sequence[Instruction], window: int) -> None:
        self.instructions, self.window = instructions, window
        self.actions: list[Action] = []
        self.started = [False] * len(instructions)
        self.finished = [False] * len(instructions)
        self.sends: deque[int] = deque()  # in flight
        self.receives: deque[int] = deque()  # in flight
        self.later: dict[int | None, deque[int]] = {}  # receives not posted yet, by peer, whose order holds
        self.turn: dict[int | None, int] = {}  # of peers: those with an earlier first receive come first
        self.ready: list[tuple[int, int]] = []  # heap of receives that could be posted, as (turn of the peer, index)
        self.waits = [0] * len(instructions)  # of each receive: how many instructions it still waits for
        self.followers: dict[int, list[int]] = {}  # receives that wait for an instruction
        for index, (op, _, _, peer, after, _) in enumerate(instructions):
            if op is _RECV:
                self._note(index, peer, after)

    def _note(self, index: int, peer: int | None, after: Sequence[int]) -> None:
        """Take note of a receive."""
        self.waits[index] = len(after)
        followers = self.followers
        for earlier in after:
            if earlier in followers:
                followers[earlier].append(index)
            else:
                followers[earlier] = [index]
        queue = self.later.get(peer)
        if queue is None:
            self.later[peer] = deque((index,))
            self.turn[peer] = len(self.turn)
            if not after:
                heappush(self.ready, (self.turn[peer], index))
        else:
            queue.append(index)

    def run(self) -> tuple[Action, ...]:
        self.hoist()
        started, finished = self.started, self.finished
        for index, (op, _, _, _, after, _) in enumerate(self.instructions):
            if started[index]:
                continue
            for earlier in after:
                if not finished[earlier]:
                    self.finish(earlier)
            if op is _SEND or op is _RECV:
                flying = self.sends if op is _SEND else self.receives
                while len(flying) >= self.window and not started[index]:
                    self.finish(flying[0])
                if not started[index]:
                    self.start(index, op)
            else:
                self.actions.append(_new(Action, (_DO_NATIVE if op is _NATIVE else _DO_COMPUTE, index)))
                started[index] = True
                self.end(index)
        for index in range(len(finished)):
            if not finished[index]:
                self.finish(index)
        return tuple(self.actions)

    def start(self, index: int, op: Op) -> None:
        """Start a message."""
        self.started[index] = True
        if op is _SEND:
            self.actions.append(_new(Action, (_DO_SEND, index)))
            self.sends.append(index)
            return
        self.actions.append(_new(Action, (_DO_RECV, index)))
        self.receives.append(index)
        peer = self.instructions[index][3]
        queue = self.later[peer]
        queue.popleft()
        if queue and not self.waits[queue[0]]:  # the next one from that peer
            heappush(self.ready, (self.turn[peer], queue[0]))

    def finish(self, index: int) -> None:
        """Await a message."""
        self.actions.append(_new(Action, (_DO_WAIT, index)))
        (self.sends if self.instructions[index][0] is _SEND else self.receives).remove(index)
        self.end(index)

    def end(self, index: int) -> None:
        """Note that an instruction is finished, and post what waited for it."""
        self.finished[index] = True
        followers = self.followers.get(index)
        if followers is not None:
            waits = self.waits
            for follower in followers:
                waits[follower] -= 1
                if not waits[follower] and not self.started[follower]:
                    peer = self.instructions[follower][3]
                    if self.later[peer][0] == follower:
                        heappush(self.ready, (self.turn[peer], follower))
        if self.ready:
            self.hoist()

    def hoist(self) -> None:
        """Post every receive that is the next from its peer, waits for nothing unfinished, and fits the window."""
        while self.ready and len(self.receives) < self.window:
            _, index = heappop(self.ready)
            if not self.started[index]:  # else it was started in its place in the list
                self.start(index, _RECV)


def choose_window(program: Program, window: int) -> int:
    """Return the smallest doubling of `window` with which no rank waits in a circle.

    Every rank computes it from the same program, so all choose the same.
    """
    if window < 1:
        raise StrategyError(f"window of {window} messages; wanted >= 1")
    longest = max(len(instructions) for instructions in program.ranks)
    while stuck := stuck_ranks(program, [schedule(instructions, window) for instructions in program.ranks]):
        if window >= longest:
            rank, index = stuck[0]
            raise StrategyError(f"{program.strategy}: ranks wait in a circle; {_place(program, rank, index)}")
        window *= 2
    return window


def stuck_ranks(program: Program, schedules: Sequence[Sequence[Action]]) -> list[tuple[int, int]]:
    """Play the schedules against each other and return (rank, instruction) wherever one never goes on.

    A send ends only when its receive is posted, a receive when its send is, a native call when all ranks are in it.
    """
    play = _Play(program, schedules)
    ranks = range(program.world_size)
    while sum(play.advance(rank) for rank in ranks):  # a round in which a rank moved
        pass
    return [(rank, schedules[rank][play.position[rank]].step) for rank in ranks if not play.ended(rank)]


class _Play:
    """How far each rank has come; messages are counted per pair, since the k-th send fills the k-th receive."""

    def __init__(self, program: Program, schedules: Sequence[Sequence[Action]]) -> None:
        self.program, self.schedules = program, schedules
        self.position = [0] * program.world_size
        self.posted: dict[tuple[Op, int, int], int] = defaultdict(int)  # (op, rank, peer) -> how many
        self.ordinal: list[dict[int, int]] = [{} for _ in range(program.world_size)]
        self.natives: list[set[int]] = [set() for _ in range(program.world_size)]

    def ended(self, rank: int) -> bool:
        return self.position[rank] == len(self.schedules[rank])

    def advance(self, rank: int) -> bool:
        """Run a rank until it must wait; say whether it moved."""
        before = self.position[rank]
        actions, instructions = self.schedules[rank], self.program.ranks[rank]
        while self.position[rank] < len(actions):
            action = actions[self.position[rank]]
            if not self._step(rank, action, instructions[action.step]):
                break
            self.position[rank] += 1
        return self.position[rank] > before

    def _step(self, rank: int, action: Action, instruction: Instruction) -> bool:
        if action.do is Do.NATIVE:
            self.natives[rank].add(action.step)
            return min(len(calls) for calls in self.natives) >= len(self.natives[rank])
        if action.do is Do.COMPUTE:
            return True
        assert instruction.peer is not None
        if action.do is Do.WAIT:
            other = Op.RECV if instruction.op is Op.SEND else Op.SEND
            return self.posted[other, instruction.peer, rank] > self.ordinal[rank][action.step]
        key = (instruction.op, rank, instruction.peer)
        self.ordinal[rank][action.step] = self.posted[key]
        self.posted[key] += 1
        return True


def _place(program: Program, rank: int, index: int) -> str:
    return f"rank {rank} stops at instruction {index}: {program.ranks[rank][index]}"
