"""Flows: blocks that follow one another over a link, each once the flows it needs have brought theirs.

In a tree a rank has several neighbours, and which message it should handle next is not obvious; a rank that waits for
the wrong one holds up others. So the order is found by trying: all flows run in time steps in which a rank sends one
block and receives one. A flow goes before others in the steps that are its turn, so that in the long run none is left
behind. Each rank then lists its messages in the order of those steps. Time is the same everywhere, so both ends of a
link agree on the order of its messages.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.program import Slice
from penstock.program.builder import ProgramBuilder
from penstock.strategies.colouring import turns
from penstock.strategies.pipeline import DEPTH, Arrival, Departure, emit


@dataclass(frozen=True, slots=True)
class Flow:
    """The way of some blocks from one rank to another."""

    source: int
    target: int
    blocks: tuple[Slice, ...]
    merged: bool  # blocks are added to what the target has; otherwise they replace it
    needs: tuple[int, ...] = ()  # flows to `source` that must bring block i before it leaves, as indices
    follows: int | None = None  # flow to `target` that brings block i first: sums are rounded in one order for all i


@dataclass(frozen=True, slots=True)
class _Message:
    step: int
    flow: int
    block: int


def emit_flows(builder: ProgramBuilder, flows: Sequence[Flow], block_numel: int) -> None:
    """Issue the messages of all flows on all ranks."""
    coming: list[list[_Message]] = [[] for _ in range(builder.world_size)]
    going: list[list[_Message]] = [[] for _ in range(builder.world_size)]
    for message in _schedule(flows):
        coming[flows[message.flow].target].append(message)
        going[flows[message.flow].source].append(message)
    for rank, (arriving, leaving) in enumerate(zip(coming, going, strict=True)):
        arrivals = [
            Arrival(flows[m.flow].source, flows[m.flow].blocks[m.block], flows[m.flow].merged) for m in arriving
        ]
        emit(builder, rank, arrivals, _departures(flows, arriving, leaving), block_numel)


def _schedule(flows: Sequence[Flow]) -> list[_Message]:
    """Return all messages in the order of their steps."""
    turn_of, turn_count = turns([(flow.source, flow.target) for flow in flows])
    brought = [0] * len(flows)  # blocks that each flow has brought
    messages: list[_Message] = []
    step = 0
    while any(count < len(flow.blocks) for count, flow in zip(brought, flows, strict=True)):
        turn = step % turn_count
        step += 1
        order = sorted(range(len(flows)), key=lambda one: (turn_of[one] != turn, brought[one]))
        moving = _moving(flows, brought, order)
        assert moving, "flows need one another in a circle"
        for index in moving:
            messages.append(_Message(step, index, brought[index]))
            brought[index] += 1
    return messages


def _moving(flows: Sequence[Flow], brought: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return the flows that move a block in the next step, the first in `order` first."""
    sending: set[int] = set()
    receiving: set[int] = set()
    moving = []
    for index in order:
        flow, block = flows[index], brought[index]
        before = flow.needs if flow.follows is None else (*flow.needs, flow.follows)
        ready = block < len(flow.blocks) and all(brought[need] > block for need in before)
        if ready and flow.source not in sending and flow.target not in receiving:
            sending.add(flow.source)
            receiving.add(flow.target)
            moving.append(index)
    return moving


def _departures(flows: Sequence[Flow], arriving: list[_Message], leaving: list[_Message]) -> list[Departure]:
    """Return the departures of a rank, each after what it needs and not far ahead of the schedule."""
    position = {(one.flow, one.block): index for index, one in enumerate(arriving)}
    steps = [one.step for one in arriving]
    departures = []
    for one in leaving:
        flow = flows[one.flow]
        needed = max((position[need, one.block] for need in flow.needs), default=-1)
        before = bisect_left(steps, one.step)
        departures.append(Departure(flow.target, flow.blocks[one.block], max(needed, before - 1 - DEPTH)))
    return departures
