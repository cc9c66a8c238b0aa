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

from dataclasses import dataclass

from penstock.network import LinearCost, Network
from penstock.program import DATA, Collective, Part, Slice
from penstock.program.builder import PartBuilder
from penstock.strategies.closed_form import SyncCounts, ceil_log2, constants
from penstock.strategies.compress import compressed
from penstock.strategies.strategy import DEFAULT, Options, Strategy

NAME = "spanning_tree"


def broadcast(rank: int, world_size: int, numel: int, options: Options) -> Part:
    """Send the root's data down the tree: log p (alpha + n beta)."""
    builder = PartBuilder(NAME, Collective.BROADCAST, rank, world_size, numel, options.root)
    _broadcast(builder, options.root)
    return builder.build()


def reduce(rank: int, world_size: int, numel: int, options: Options) -> Part:
    """Sum up the tree to the root: log p (alpha + n beta + n gamma)."""
    builder = PartBuilder(NAME, Collective.REDUCE, rank, world_size, numel, options.root)
    _reduce(builder, options.root)
    return builder.build()


def all_reduce(rank: int, world_size: int, numel: int, options: Options) -> Part:
    """Sum up the tree to rank 0, then send the sum down again: log p (2 alpha + 2 n beta + n gamma)."""
    builder = PartBuilder(NAME, Collective.ALL_REDUCE, rank, world_size, numel)
    builder.units = [Slice(DATA, 0, numel)] if numel else []
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


def edges_of(rank: int, world_size: int, root: int) -> list[Edge]:
    """Return the edges of the tree that end at `rank`: the one to it, where there is one, then those from it."""
    found = []
    low, high = 0, world_size
    while high - low > 1:
        middle = (low + high + 1) // 2  # the left half is the larger
        edge = Edge(root, high - 1, middle, high) if root < middle else Edge(root, low, low, middle)
        if rank in (edge.parent, edge.child):
            found.append(edge)
        inside = rank < middle
        root = root if (root < middle) == inside else edge.child
        low, high = (low, middle) if inside else (middle, high)
    return found


def _broadcast(builder: PartBuilder, root: int) -> None:
    data = Slice(DATA, 0, builder.numel)
    for edge in edges_of(builder.rank, builder.world_size, root):
        builder.message(edge.parent, edge.child, data, data, in_turn=True)


def _reduce(builder: PartBuilder, root: int) -> None:
    data, arrived = Slice(DATA, 0, builder.numel), Slice("inbox", 0, builder.numel)
    if builder.world_size > 1:
        builder.scratch("inbox", builder.numel)
    for edge in reversed(edges_of(builder.rank, builder.world_size, root)):
        builder.message(edge.child, edge.parent, data, arrived)
        if edge.parent == builder.rank:
            builder.merge(data, arrived)


def broadcast_cost(network: Network, p: int, options: Options = DEFAULT) -> LinearCost:
    """Every level passes the whole message on: log p (alpha + n beta) (Wang et al. Table 1)."""
    alpha, beta, _ = constants(network)
    return LinearCost(alpha * ceil_log2(p), beta * ceil_log2(p))


def reduce_cost(network: Network, p: int, options: Options = DEFAULT) -> LinearCost:
    """The broadcast backwards, with a summation at every level (Wang et al. Table 1)."""
    alpha, beta, gamma = constants(network)
    return LinearCost(alpha * ceil_log2(p), (beta + gamma) * ceil_log2(p))


def cost(network: Network, p: int, options: Options = DEFAULT) -> LinearCost:
    """All-reduce: reduce, then broadcast; the same cost as `binary_tree`, another shape."""
    return reduce_cost(network, p, options) + broadcast_cost(network, p, options)


def counts(workers: int, pieces: int) -> SyncCounts:
    """Every level sends and decodes whole pieces, and encodes anew on the way up."""
    levels = ceil_log2(workers)
    return SyncCounts(2 * levels, levels + 1, levels + 1)


SPANNING_TREE = Strategy(
    NAME,
    {Collective.ALL_REDUCE: all_reduce, Collective.BROADCAST: broadcast, Collective.REDUCE: reduce},
    coded=compressed(all_reduce),
    costs={Collective.ALL_REDUCE: cost, Collective.BROADCAST: broadcast_cost, Collective.REDUCE: reduce_cost},
    counts=counts,
)
