"""Double binary trees: two trees, each for half of the data, arranged so that no rank works hard in both.

In a binary tree half of the ranks are leaves and use half of their links. A second tree in which those leaves are
inside, and the first tree's inner ranks leaves, carries the other half of the data at the same time (Sanders et al.
2009; NCCL). Each half goes up its tree block by block, merged on the way, and the sum of a block comes down as soon
as the root has it.

    trees on 4 ranks, first half of the data        second half: the mirror image

            3                                             0
          1                                             2
        0   2                                         3   1

    rank 1 is inside the first tree, with children 0 and 2, and a leaf of the second; rank 2 the other way round

A rank receives and sends 2n bytes at most, as in a ring, but a block needs only about 2 log2 N steps to every rank.
With an odd number of ranks the second tree is the first moved on by one rank.

A rank has up to four neighbours, and which message it should handle next is not obvious; one that waits for the wrong
message holds up others. So time is cut into steps, every edge of a tree sends a block up in each fourth step and
another down in each fourth, and each rank lists its messages in the order of their steps. Even steps are for blocks on
their way up, odd ones for those on their way down. Which of the two even steps an edge has is a colour: the edges to
the two children of a rank have different ones, since it receives from both, and so have the edges to the two parents of
a rank, since it sends to both. An edge shares an end in this sense with at most two others, so that edges form paths,
and rings in which both kinds of sharing take turns: two colours are enough (Sanders et al.). Both ends of an edge find
the same.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from penstock.network import LinearCost, Network
from penstock.program import Collective, Part, Slice, split
from penstock.program.builder import PartBuilder
from penstock.strategies.closed_form import ZERO, ceil_log2, constants
from penstock.strategies.compress import compressed
from penstock.strategies.linear_pipeline import DEFAULT_BLOCK_NBYTES
from penstock.strategies.pipeline import DEPTH, Arrival, Departure, blocks, declare_inbox, emit
from penstock.strategies.strategy import DEFAULT, Cut, Options, Strategy

NAME = "double_tree"
PERIOD = 4  # steps from one block of an edge to the next in the same direction


def all_reduce(rank: int, world_size: int, numel: int, options: Options) -> Part:
    """Sum each half of the data up and down its own tree."""
    builder = PartBuilder(NAME, Collective.ALL_REDUCE, rank, world_size, numel)
    block_numel = min(options.pipe_block(-(-numel // 2)), numel)
    halves = [blocks(start, stop, block_numel) for start, stop in split(numel, 2)]
    builder.units = [block for half in halves for block in half]
    if world_size > 1:
        declare_inbox(builder, block_numel)
        coming, going = _messages(rank, world_size, halves)
        arrivals = [Arrival(one.peer, one.block, one.up) for one in coming]
        emit(builder, arrivals, _departures(coming, going), block_numel)
    return builder.build()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands in a tree."""

    parent: int | None  # None for the root
    children: tuple[int, ...]


def place_in_tree(rank: int, world_size: int, second: bool) -> Place:
    """Return the rank's place in the first or second tree.

    Ranks get positions 1 to N. The tree keeps them in order: position x with lowest bit b has the subtree of
    positions x - b + 1 to x + b - 1, so odd positions are leaves. The second tree gives each rank a position of the
    other parity, except, for odd N, one rank that is a leaf in both.
    """
    position = _position(rank, world_size, second)
    bit = position & -position
    children = [position - bit // 2] if bit > 1 else []
    step = bit // 2
    while step and position + step > world_size:  # the right subtree is cut off: its root is smaller
        step //= 2
    children += [position + step] if step else []
    parent = _parent(position, world_size)
    return Place(
        None if parent is None else _rank(parent, world_size, second),
        tuple(_rank(child, world_size, second) for child in children),
    )


def _position(rank: int, world_size: int, second: bool) -> int:
    if not second:
        return rank + 1
    return world_size - rank if world_size % 2 == 0 else (rank + 1) % world_size + 1


def _rank(position: int, world_size: int, second: bool) -> int:
    if not second:
        return position - 1
    return world_size - position if world_size % 2 == 0 else (position - 2) % world_size


def _parent(position: int, world_size: int) -> int | None:
    if position == 1 << world_size.bit_length() - 1:
        return None
    bit = position & -position
    above = position - bit | 2 * bit
    while above > world_size:  # cut off; the next one up is to the left
        bit = above & -above
        above = above - bit | 2 * bit
    return above


class _Message(NamedTuple):
    """A block that this rank sends or receives."""

    step: int
    peer: int
    block: Slice
    up: bool  # a partial sum; otherwise the finished one


def _messages(rank: int, world_size: int, halves: list[list[Slice]]) -> tuple[list[_Message], list[_Message]]:
    """Return what a rank receives and what it sends, each in the order of its step."""
    coming: list[_Message] = []
    going: list[_Message] = []
    for second, half in enumerate(halves):
        place, tree = place_in_tree(rank, world_size, bool(second)), _trees(world_size)[second]
        edges = [(child, child, coming, going) for child in place.children]
        edges += [] if place.parent is None else [(rank, place.parent, going, coming)]
        for child, peer, upward, downward in edges:
            up, down = tree.up[child], tree.down[child]
            upward += [_Message(up + PERIOD * index, peer, block, True) for index, block in enumerate(half)]
            downward += [_Message(down + PERIOD * index, peer, block, False) for index, block in enumerate(half)]
    return sorted(coming), sorted(going)


def _departures(coming: list[_Message], going: list[_Message]) -> list[Departure]:
    """Return the departures of a rank, each after what it needs and not far ahead of what comes in earlier steps."""
    summed = {one.block: index for index, one in enumerate(coming) if one.up}  # the last that is added to a block
    finished = {one.block: index for index, one in enumerate(coming) if not one.up}
    steps = [one.step for one in coming]
    departures = []
    for one in going:
        needed = summed.get(one.block, -1) if one.up else finished.get(one.block, summed.get(one.block, -1))
        ahead = bisect_left(steps, one.step) - 1 - DEPTH
        departures.append(Departure(one.peer, one.block, max(needed, ahead), finished=not one.up))
    return departures


class _Tree(NamedTuple):
    """When the first block crosses the edge between a rank and its parent, by rank; the root has none."""

    up: dict[int, int]
    down: dict[int, int]


@lru_cache(maxsize=8)
def _trees(world_size: int) -> tuple[_Tree, _Tree]:
    """Return the steps of both trees: 20 ms for 2,048 ranks, the same on each of them."""
    places = tuple([place_in_tree(rank, world_size, second) for rank in range(world_size)] for second in (False, True))
    colours = _colours(places)
    return _tree(places[0], colours[0], world_size, False), _tree(places[1], colours[1], world_size, True)


def _colours(places: tuple[list[Place], ...]) -> tuple[dict[int, int], dict[int, int]]:
    """Return 0 or 1 for the edge to each rank's parent, in both trees; see the top of this file."""
    found: tuple[dict[int, int], dict[int, int]] = {}, {}
    for first in range(len(places[0])):
        for start in (0, 1):
            walk, colour = [(start, first)], 0
            while walk:
                tree, rank = walk.pop()
                parent = places[tree][rank].parent
                if parent is None or rank in found[tree]:
                    continue
                others = [found[tree][one] for one in places[tree][parent].children if one in found[tree]]
                others += [found[1 - tree][rank]] if rank in found[1 - tree] else []
                colour = 1 - others[0] if others else 0
                assert all(other != colour for other in others)
                found[tree][rank] = colour
                walk += [(tree, one) for one in places[tree][parent].children] + [(1 - tree, rank)]
    return found


def _tree(places: list[Place], colours: dict[int, int], world_size: int, second: bool) -> _Tree:
    """Give every edge the first step of its colour in which what it needs is there.

    Of two children the first is added first, for every block: else a sum's rounding would depend on where it stands.
    """
    up: dict[int, int] = {}
    down: dict[int, int] = {}
    positions = sorted(range(1, world_size + 1), key=lambda position: position & -position)
    ranks = [_rank(position, world_size, second) for position in positions]  # children before parents
    summed: dict[int, int] = {}  # rank: the step in which its last child's block comes
    for rank in ranks:
        ready = -1
        for child in places[rank].children:
            up[child] = _next_step(max(ready, summed[child]), 2 * colours[child])
            ready = up[child]
        summed[rank] = ready
    for rank in reversed(ranks):
        ready = down.get(rank, summed[rank])
        for child in places[rank].children:
            down[child] = _next_step(ready, 2 * colours[child] + 1)
    return _Tree(up, down)


def _next_step(after: int, slot: int) -> int:
    """Return the first step after `after` that is `slot` modulo the period."""
    return after + 1 + (slot - after - 1) % PERIOD


def cost(network: Network, p: int, options: Options = DEFAULT) -> LinearCost:
    """All-reduce of both trees at once, in blocks of b bytes: the steps of the simulated program.

        (4 log p - 2) alpha + 9/2 (log p - 2) b beta + n/2b 9/2 (alpha + b beta) + n gamma

    One block takes 4 log p - 2 steps. An edge sends a block each way in `PERIOD` steps, and ranks that wait for one
    another take half a step more; two and three ranks have fewer neighbours. MG-WFBP's Table 2 has less than any
    all-reduce can do (`cost.papers.double_tree`).
    """
    if p == 1:
        return ZERO
    alpha, beta, gamma = constants(network)
    steps, levels = {2: 2.0, 3: 3.0}.get(p, PERIOD + 0.5), ceil_log2(p)  # for a block of each half
    block_seconds = DEFAULT_BLOCK_NBYTES * beta
    filling = steps * max(levels - 2, 0) * block_seconds
    per_byte = steps * (alpha + block_seconds) / (2 * DEFAULT_BLOCK_NBYTES)
    return LinearCost((4 * levels - 2) * alpha + filling, per_byte + gamma)


DOUBLE_TREE = Strategy(
    NAME,
    {Collective.ALL_REDUCE: all_reduce},
    coded=compressed(all_reduce),
    cut=lambda _, __: Cut(2),
    costs={Collective.ALL_REDUCE: cost},
)
