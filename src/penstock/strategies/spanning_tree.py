"""Minimum spanning tree: halve the ranks again and again, one message between the halves (Chan et al. 2007).

The rank that holds the data sends all of it to the far end of the other half; both halves then go on by themselves.
A reduce is the same tree walked backwards, an all-reduce both.

    broadcast on 5 ranks, root 1           reduce: each message backwards, merged on arrival

    step 1   1 -> 4                        step 1   0 -> 1
    step 2   1 -> 2, 4 -> 3                step 2   2 -> 1, 3 -> 4
    step 3   1 -> 0                        step 3   4 -> 1

ceil(log2 p) steps, each with all n bytes: the fewest startups there are, but log p times the bytes of a pipeline.
Messages are not cut into blocks, and a rank sends one at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.program import DATA, Collective, Program, Slice
from penstock.program.builder import ProgramBuilder
from penstock.strategies.options import Options


def broadcast(world_size: int, numel: int, options: Options) -> Program:
    """Send the root's data down the tree: log p (alpha + n beta)."""
    builder = ProgramBuilder("spanning_tree", Collective.BROADCAST, world_size, numel, options.root)
    _broadcast(builder, options.root)
    return builder.build()


def reduce(world_size: int, numel: int, options: Options) -> Program:
    """Sum up the tree to the root: log p (alpha + n beta + n gamma)."""
    builder = ProgramBuilder("spanning_tree", Collective.REDUCE, world_size, numel, options.root)
    _reduce(builder, options.root)
    return builder.build()


def all_reduce(world_size: int, numel: int, options: Options) -> Program:
    """Sum up the tree to rank 0, then send the sum down again: log p (2 alpha + 2 n beta + n gamma)."""
    builder = ProgramBuilder("spanning_tree", Collective.ALL_REDUCE, world_size, numel)
    _reduce(builder, 0)
    _broadcast(builder, 0)
    return builder.build()


@dataclass(frozen=True, slots=True)
class Edge:
    """One message of the tree: to `child`, on behalf of ranks `low` to `high` (one past the last)."""

    parent: int
    child: int
    low: int
    high: int


def edges(low: int, high: int, root: int) -> Iterator[Edge]:
    """Yield the tree over ranks `low` to `high`, the edge to a rank before the edges from it."""
    if high - low < 2:
        return
    middle = (low + high + 1) // 2  # the left half is the larger
    if root < middle:
        yield Edge(root, high - 1, middle, high)
        yield from edges(low, middle, root)
        yield from edges(middle, high, high - 1)
    else:
        yield Edge(root, low, low, middle)
        yield from edges(low, middle, low)
        yield from edges(middle, high, root)


def _broadcast(builder: ProgramBuilder, root: int) -> None:
    data = Slice(DATA, 0, builder.numel)
    for edge in edges(0, builder.world_size, root):
        builder.message(edge.parent, edge.child, data, data, in_turn=True)


def _reduce(builder: ProgramBuilder, root: int) -> None:
    data, arrived = Slice(DATA, 0, builder.numel), Slice("inbox", 0, builder.numel)
    if builder.world_size > 1:
        builder.scratch("inbox", builder.numel)
    for edge in reversed(list(edges(0, builder.world_size, root))):
        builder.message(edge.child, edge.parent, data, arrived)
        builder.merge(edge.parent, data, arrived)
