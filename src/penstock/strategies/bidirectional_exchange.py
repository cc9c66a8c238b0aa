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

from penstock.program import DATA, Collective, Program, Slice, split
from penstock.program.builder import ProgramBuilder
from penstock.strategies.options import Options
from penstock.strategies.spanning_tree import edges

INBOX = "inbox"
NAME = "bidirectional_exchange"


def all_reduce(world_size: int, numel: int, options: Options) -> Program:
    """Sum each chunk on one rank, then collect the chunks: 2 log2 p steps."""
    builder = ProgramBuilder(NAME, Collective.ALL_REDUCE, world_size, numel)
    _reduce_scatter(builder)
    _all_gather(builder)
    return builder.build()


def reduce_scatter(world_size: int, numel: int, options: Options) -> Program:
    """Leave the sum of chunk r on rank r: log2 p steps."""
    builder = ProgramBuilder(NAME, Collective.REDUCE_SCATTER, world_size, numel)
    _reduce_scatter(builder)
    return builder.build()


def all_gather(world_size: int, numel: int, options: Options) -> Program:
    """Give chunk r of rank r to every rank: log2 p steps."""
    builder = ProgramBuilder(NAME, Collective.ALL_GATHER, world_size, numel)
    _all_gather(builder)
    return builder.build()


def broadcast(world_size: int, numel: int, options: Options) -> Program:
    """Scatter the root's chunks down the spanning tree, then collect them: 2 log2 p steps, 2 (p-1)/p n bytes."""
    builder = ProgramBuilder(NAME, Collective.BROADCAST, world_size, numel, options.root)
    for edge in edges(0, world_size, options.root):
        part = _chunks(builder, edge.low, edge.high)
        builder.message(edge.parent, edge.child, part, part, in_turn=True)
    _all_gather(builder)
    return builder.build()


def reduce(world_size: int, numel: int, options: Options) -> Program:
    """Sum each chunk on one rank, then gather the chunks up the spanning tree: 2 log2 p steps, 2 (p-1)/p n bytes."""
    builder = ProgramBuilder(NAME, Collective.REDUCE, world_size, numel, options.root)
    _reduce_scatter(builder)
    for edge in reversed(list(edges(0, world_size, options.root))):
        part = _chunks(builder, edge.low, edge.high)
        builder.message(edge.child, edge.parent, part, part)
    return builder.build()


def _reduce_scatter(builder: ProgramBuilder) -> None:
    used = [0] * builder.world_size  # inbox elements of each rank: no two messages share any, so all may run ahead
    for low, middle, high in _halvings(0, builder.world_size):
        left, right = _chunks(builder, low, middle), _chunks(builder, middle, high)
        arrived = []
        for one, other in _pairs(low, middle, high):
            arrived.append(_deliver(builder, one, other, right, used))
            if one - low < high - middle:  # the odd rank's partner has answered another rank
                arrived.append(_deliver(builder, other, one, left, used))
        for rank, part, inbox in arrived:
            builder.merge(rank, part, inbox)
    if builder.world_size > 1:
        builder.scratch(INBOX, max(used))


def _deliver(
    builder: ProgramBuilder, source: int, target: int, part: Slice, used: list[int]
) -> tuple[int, Slice, Slice]:
    """Send `part` to a fresh place in the target's inbox; return what is to be merged."""
    inbox = Slice(INBOX, used[target], used[target] + part.numel)
    used[target] += part.numel
    builder.message(source, target, part, inbox)
    return target, part, inbox


def _all_gather(builder: ProgramBuilder) -> None:
    for low, middle, high in reversed(list(_halvings(0, builder.world_size))):
        left, right = _chunks(builder, low, middle), _chunks(builder, middle, high)
        for one, other in _pairs(low, middle, high):
            builder.message(other, one, right, right)
            if one - low < high - middle:
                builder.message(one, other, left, left)


def _halvings(low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """Yield (low, middle, high) for each range of ranks that is halved, a range before its halves."""
    if high - low > 1:
        middle = (low + high + 1) // 2
        yield low, middle, high
        yield from _halvings(low, middle)
        yield from _halvings(middle, high)


def _pairs(low: int, middle: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield a partner in the right half for each rank of the left; the last right rank may have two."""
    for offset in range(middle - low):
        yield low + offset, min(middle + offset, high - 1)


def _chunks(builder: ProgramBuilder, low: int, high: int) -> Slice:
    """Return the chunks of ranks `low` to `high`."""
    chunks = split(builder.numel, builder.world_size)
    return Slice(DATA, chunks[low][0], chunks[high - 1][1])
