"""Bidirectional exchange: the two halves of the ranks exchange halves of the data, then each half by itself (Chan).

The data is cut into one chunk per rank. In a reduce-scatter the i-th rank of the left half sends the right half's
chunks to the i-th rank of the right half and gets its own half's chunks in return; then the halves go on separately
until each rank has its own chunk. An all-gather is the same backwards. With an odd number of ranks the left half has
one more, and its last rank shares the partner of the one before: no folding is needed.

    reduce-scatter of chunks a b c on 3 ranks; a2 is rank 2's part, a02 a partial sum, A the whole sum

    step 1   0 -> 2: c0   2 -> 0: a2 b2      0 has a02 b02, 1 has a1 b1, 2 has c02
    step 2   1 -> 2: c1   0 -> 1: b02        2 has C, 1 has B
    step 3   1 -> 0: a1                      0 has A

log2 p steps for a power of two, (p-1)/p n bytes per rank; one message more at each level with an odd rank.
All-reduce: reduce-scatter and all-gather. Broadcast: the spanning tree scatters the chunks, an all-gather follows.
Reduce: a reduce-scatter, then the tree gathers the chunks (Wang et al., Table 1; there the broadcast's all-gather goes
round a ring and takes p - 1 steps). Each chunk is summed by one rank, so all ranks end with the same bits.
"""

from collections.abc import Iterator

from penstock.network import LinearCost, Network
from penstock.program import DATA, Collective, Part, Slice, split
from penstock.program.builder import PartBuilder
from penstock.strategies import halving_doubling
from penstock.strategies.closed_form import ZERO, ceil_log2, constants, floor_log2
from penstock.strategies.compress import compressed
from penstock.strategies.spanning_tree import edges_of
from penstock.strategies.strategy import DEFAULT, Options, Strategy, one_chunk_per_rank

INBOX = "inbox"
NAME = "bidirectional_exchange"


def all_reduce(rank: int, world_size: int, numel: int, options: Options) -> Part:
    """Sum each chunk on one rank, then collect the chunks: 2 log2 p steps."""
    builder = PartBuilder(NAME, Collective.ALL_REDUCE, rank, world_size, numel)
    builder.units = [Slice(DATA, start, stop) for start, stop in split(numel, world_size) if start < stop]
    _reduce_scatter(builder)
    _all_gather(builder)
    return builder.build()


def reduce_scatter(rank: int, world_size: int, numel: int, options: Options) -> Part:
    """Leave the sum of chunk r on rank r: log2 p steps."""
    builder = PartBuilder(NAME, Collective.REDUCE_SCATTER, rank, world_size, numel)
    _reduce_scatter(builder)
    return builder.build()


def all_gather(rank: int, world_size: int, numel: int, options: Options) -> Part:
    """Give chunk r of rank r to every rank: log2 p steps."""
    builder = PartBuilder(NAME, Collective.ALL_GATHER, rank, world_size, numel)
    _all_gather(builder)
    return builder.build()


def broadcast(rank: int, world_size: int, numel: int, options: Options) -> Part:
    """Scatter the root's chunks down the spanning tree, then collect them: 2 log2 p steps, 2 (p-1)/p n bytes."""
    builder = PartBuilder(NAME, Collective.BROADCAST, rank, world_size, numel, options.root)
    for edge in edges_of(rank, world_size, options.root):
        part = _chunks(builder, edge.low, edge.high)
        builder.message(edge.parent, edge.child, part, part, in_turn=True)
    _all_gather(builder)
    return builder.build()


def reduce(rank: int, world_size: int, numel: int, options: Options) -> Part:
    """Sum each chunk on one rank, then gather the chunks up the spanning tree: 2 log2 p steps, 2 (p-1)/p n bytes."""
    builder = PartBuilder(NAME, Collective.REDUCE, rank, world_size, numel, options.root)
    _reduce_scatter(builder)
    for edge in reversed(edges_of(rank, world_size, options.root)):
        part = _chunks(builder, edge.low, edge.high)
        builder.message(edge.child, edge.parent, part, part)
    return builder.build()


def _reduce_scatter(builder: PartBuilder) -> None:
    used = 0  # inbox elements: no two messages share any, so all may run ahead
    for low, middle, high in _halvings(builder.rank, builder.world_size):
        arrived = []
        for source, target in _messages(builder.rank, low, middle, high):
            part = _chunks(builder, low, middle) if target < middle else _chunks(builder, middle, high)
            inbox = Slice(INBOX, used, used + part.numel)
            builder.message(source, target, part, inbox)
            if target == builder.rank:
                used += part.numel
                arrived.append((part, inbox))
        for part, inbox in arrived:
            builder.merge(part, inbox)
    if builder.world_size > 1:
        builder.scratch(INBOX, used)


def _all_gather(builder: PartBuilder) -> None:
    for low, middle, high in reversed(list(_halvings(builder.rank, builder.world_size))):
        for source, target in _messages(builder.rank, low, middle, high, right_first=True):
            part = _chunks(builder, low, middle) if source < middle else _chunks(builder, middle, high)
            builder.message(source, target, part, part)


def _halvings(rank: int, world_size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (low, middle, high) for each range of ranks around `rank` that is halved, the largest first."""
    low, high = 0, world_size
    while high - low > 1:
        middle = (low + high + 1) // 2
        yield low, middle, high
        low, high = (low, middle) if rank < middle else (middle, high)


def _messages(rank: int, low: int, middle: int, high: int, right_first: bool = False) -> Iterator[tuple[int, int]]:
    """Yield what `rank` sends to the other half or gets from it, as (source, target), in the order all ranks keep.

    Each rank of the left half has a partner in the right; the last of the right may have two, and answers the first.
    """
    last = high - 1
    lefts = [rank] if rank < middle else [low + rank - middle] + ([middle - 1] if rank == last else [])
    for left in dict.fromkeys(lefts):
        right = min(middle + left - low, last)
        answered = left - low < high - middle
        if right_first:
            yield right, left
            if answered:
                yield left, right
        else:
            yield left, right
            if answered:
                yield right, left


def _chunks(builder: PartBuilder, low: int, high: int) -> Slice:
    """Return the chunks of ranks `low` to `high`."""
    return Slice(DATA, builder.numel * low // builder.world_size, builder.numel * high // builder.world_size)


def broadcast_cost(network: Network, p: int, options: Options = DEFAULT) -> LinearCost:
    """Spanning-tree scatter, then a ring all-gather, as MPI does it for long messages (Wang et al. Table 1)."""
    alpha, beta, _ = constants(network)
    return LinearCost((ceil_log2(p) + p - 1) * alpha, 2 * (p - 1) / p * beta)


def reduce_cost(network: Network, p: int, options: Options = DEFAULT) -> LinearCost:
    """Reduce-scatter by exchange, then a gather to the root (Wang et al. Table 1)."""
    alpha, beta, gamma = constants(network)
    rounds = floor_log2(p)
    share = 1 - 1 / 2**rounds
    odd = ZERO if 2**rounds == p else LinearCost(alpha, beta + gamma)
    return LinearCost(2 * rounds * alpha, 2 * share * beta + share * gamma) + odd


BIDIRECTIONAL_EXCHANGE = Strategy(
    NAME,
    {
        Collective.ALL_REDUCE: all_reduce,
        Collective.BROADCAST: broadcast,
        Collective.REDUCE: reduce,
        Collective.REDUCE_SCATTER: reduce_scatter,
        Collective.ALL_GATHER: all_gather,
    },
    coded=compressed(all_reduce),
    cut=one_chunk_per_rank,
    costs={
        Collective.ALL_REDUCE: halving_doubling.cost,  # also where ranks are folded there: the program does better
        Collective.BROADCAST: broadcast_cost,
        Collective.REDUCE: reduce_cost,
    },
)
