"""Binary tree: sum up a binomial tree to rank 0, then send the sum down again (MG-WFBP Table 2).

    all-reduce on 6 ranks

    step 1   1 -> 0, 3 -> 2, 5 -> 4   merged on arrival
    step 2   2 -> 0
    step 3   4 -> 0                   the sum is on rank 0
    step 4   0 -> 4
    step 5   0 -> 2, 4 -> 5
    step 6   0 -> 1, 2 -> 3

2 ceil(log2 N) steps of n bytes each: log N (2 alpha + (2 beta + gamma) n).
"""

from penstock.network import LinearCost, Network
from penstock.program import DATA, Collective, Part, Slice
from penstock.program.builder import PartBuilder
from penstock.strategies.closed_form import ceil_log2, constants
from penstock.strategies.compress import compressed
from penstock.strategies.spanning_tree import counts
from penstock.strategies.strategy import DEFAULT, Options, Strategy

NAME = "binary_tree"
INBOX = "inbox"


def all_reduce(rank: int, world_size: int, numel: int, options: Options) -> Part:
    """Sum over all ranks in 2 ceil(log2 N) steps."""
    builder = PartBuilder(NAME, Collective.ALL_REDUCE, rank, world_size, numel)
    builder.units = [Slice(DATA, 0, numel)] if numel else []
    if world_size > 1:
        builder.scratch(INBOX, numel)
    data, arrived = Slice(DATA, 0, numel), Slice(INBOX, 0, numel)
    edges = edges_of(rank, world_size)
    for parent, child in edges:
        builder.message(child, parent, data, arrived)
        if parent == rank:
            builder.merge(data, arrived)
    for parent, child in reversed(edges):
        builder.message(parent, child, data, data, in_turn=True)
    return builder.build()


def edges_of(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Return the edges of a binomial tree that end at `rank`, as (parent, child), from the leaves to rank 0.

    >>> edges_of(2, 6)
    [(2, 3), (0, 2)]
    """
    found: list[tuple[int, int]] = []
    distance = 1
    while distance < world_size:
        if rank % (2 * distance):
            return [*found, (rank - distance, rank)]
        if rank + distance < world_size:
            found.append((rank, rank + distance))
        distance *= 2
    return found


def cost(network: Network, p: int, options: Options = DEFAULT) -> LinearCost:
    """All-reduce: reduce to one rank, then broadcast; each level carries the whole message (MG-WFBP Table 2)."""
    alpha, beta, gamma = constants(network)
    levels = ceil_log2(p)
    return LinearCost(2 * alpha * levels, (2 * beta + gamma) * levels)


BINARY_TREE = Strategy(
    NAME,
    {Collective.ALL_REDUCE: all_reduce},
    coded=compressed(all_reduce),
    costs={Collective.ALL_REDUCE: cost},
    counts=counts,
)
