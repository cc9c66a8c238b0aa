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
"""

from dataclasses import dataclass

from penstock.program import Collective, Program, Slice, split
from penstock.program.builder import ProgramBuilder
from penstock.strategies.flows import Flow, emit_flows
from penstock.strategies.options import Options
from penstock.strategies.pipeline import blocks, declare_inbox


def all_reduce(world_size: int, numel: int, options: Options) -> Program:
    """Sum each half of the data up and down its own tree."""
    builder = ProgramBuilder("double_tree", Collective.ALL_REDUCE, world_size, numel)
    block_numel = min(options.pipe_block(-(-numel // 2)), numel)
    if world_size > 1:
        declare_inbox(builder, block_numel)
        halves = [tuple(blocks(start, stop, block_numel)) for start, stop in split(numel, 2)]
        flows = _tree_flows(world_size, halves[0], False, 0)
        flows += _tree_flows(world_size, halves[1], True, len(flows))
        emit_flows(builder, flows, block_numel)
    return builder.build()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands in a tree."""

    parent: int | None  # None for the root
    children: tuple[int, ...]
    depth: int  # 0 for the root


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
    ranks = {_position(other, world_size, second): other for other in range(world_size)}
    parent = _parent(position, world_size)
    return Place(
        None if parent is None else ranks[parent],
        tuple(ranks[child] for child in children),
        _depth(position, world_size),
    )


def _position(rank: int, world_size: int, second: bool) -> int:
    if not second:
        return rank + 1
    return world_size - rank if world_size % 2 == 0 else (rank + 1) % world_size + 1


def _parent(position: int, world_size: int) -> int | None:
    if position == 1 << world_size.bit_length() - 1:
        return None
    bit = position & -position
    above = position - bit | 2 * bit
    while above > world_size:  # cut off; the next one up is to the left
        bit = above & -above
        above = above - bit | 2 * bit
    return above


def _depth(position: int, world_size: int) -> int:
    parent = _parent(position, world_size)
    return 0 if parent is None else 1 + _depth(parent, world_size)


def _tree_flows(world_size: int, pieces: tuple[Slice, ...], second: bool, first_index: int) -> list[Flow]:
    """Return the flows of one tree: up to the root, then down from it; `first_index` is that of the first."""
    places = [place_in_tree(rank, world_size, second) for rank in range(world_size)]
    below = [rank for rank in range(world_size) if places[rank].parent is not None]
    up = {rank: first_index + index for index, rank in enumerate(below)}
    down = {rank: index + len(below) for rank, index in up.items()}
    flows = []
    for rank in below:
        parent = _required(places[rank].parent)
        needs = tuple(up[one] for one in places[rank].children)
        first = places[parent].children[0]
        flows.append(Flow(rank, parent, pieces, True, needs, follows=None if rank == first else up[first]))
    for rank in below:
        parent = _required(places[rank].parent)
        needs = (down[parent],) if parent in down else tuple(up[one] for one in places[parent].children)
        flows.append(Flow(parent, rank, pieces, merged=False, needs=needs))
    return flows


def _required(parent: int | None) -> int:
    assert parent is not None
    return parent
