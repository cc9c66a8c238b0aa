"""Global top-k: sparse blocks merged pair by pair, k entries kept each time (gTop-k, Algorithms 3 and 4).

`gtopk` sums up a binomial tree to rank 0 and sends the result down again:

    all-reduce on 6 ranks; [01] is the merged block of ranks 0 and 1, k entries again

    step 1   1 -> 0: [1]   3 -> 2: [3]   5 -> 4: [5]   the receiver merges and keeps what falls out
    step 2   2 -> 0: [23]
    step 3   4 -> 0: [45]                              rank 0 has the result
    step 4   0 -> 4
    step 5   0 -> 2, 4 -> 5
    step 6   0 -> 1, 2 -> 3

2 ceil(log2 N) steps of 8k bytes (Eq. 7), where an all-gather sends (N-1) 8k. `gtopk_doubling` exchanges blocks at
doubling distances instead, both ranks merging, and needs log2 N steps; other numbers of ranks are folded:

    all-reduce on 5 ranks

    step 1   4 -> 0: [4], 2 <-> 3    rank 0 has [04], ranks 2 and 3 have [23]
    step 2   0 <-> 1                 ranks 0 and 1 have [041]
    step 3   0 <-> 2, 1 <-> 3        all four have the result
    step 4   0 -> 4

After an exchange at distance d, 2d ranks have merged the same two blocks and dropped the same values. Only the first
of them keeps these, the rank that would have merged in the tree: for a power of two both variants give the same bits
and leave the same residuals. The published rule puts a dropped value back only if its index is missing from the
result, and loses the rest (erratum 4); the proof finds a program that keeps nothing (`values kept by no rank`).
"""

from penstock.program import DATA, Collective, Part, Slice
from penstock.program.builder import PartBuilder
from penstock.strategies.binary_tree import edges_of
from penstock.strategies.closed_form import Round, SparseSteps, ceil_log2, floor_log2
from penstock.strategies.recursive_doubling import both_ways, largest_power_of_two
from penstock.strategies.strategy import Options, Strategy

BLOCK = "block"
INBOX = ("inbox0", "inbox1")  # in turn, so that the next receive runs ahead of a merge


def all_reduce(rank: int, world_size: int, numel: int, options: Options) -> Part:
    """Merge up a tree to rank 0 and send the block down again: 2 ceil(log2 N) steps of one block."""
    builder = _begin("gtopk", rank, world_size, numel)
    edges = edges_of(rank, world_size) if numel else []
    block = Slice(BLOCK, 0, numel)
    for parent, child in edges:
        arrived = _inbox(builder, floor_log2(child - parent))
        builder.message(child, parent, block, arrived)
        if parent == rank:
            builder.merge(block, arrived)
    for parent, child in reversed(edges):
        builder.message(parent, child, block, block, in_turn=True)
    return _end(builder)


def all_reduce_doubling(rank: int, world_size: int, numel: int, options: Options) -> Part:
    """Exchange and merge at doubling distances: log2 N steps of one block, and two more where ranks are folded."""
    builder = _begin("gtopk_doubling", rank, world_size, numel)
    power, block = largest_power_of_two(world_size), Slice(BLOCK, 0, numel)
    extra = rank if rank >= power else rank + power
    if extra < world_size:
        builder.message(extra, extra - power, block, _inbox(builder, 1))
    if rank < power:
        if extra < world_size:
            builder.merge(block, _inbox(builder, 1))
        for turn in range(power.bit_length() - 1):
            _exchange(builder, turn)
    if extra < world_size:
        builder.message(extra - power, extra, block, block)
    return _end(builder)


def _exchange(builder: PartBuilder, turn: int) -> None:
    """Merge with the partner at distance 2^turn; of the ranks that then hold the same block the first keeps."""
    block, arrived, alike = Slice(BLOCK, 0, builder.numel), _inbox(builder, turn), 2 << turn
    for source, target in both_ways(builder.rank, builder.rank ^ 1 << turn):
        builder.message(source, target, block, arrived)
    builder.merge(block, arrived, keeps=builder.rank % alike == 0)


def _begin(name: str, rank: int, world_size: int, numel: int) -> PartBuilder:
    """Start with the rank's own block."""
    builder = PartBuilder(name, Collective.ALL_REDUCE, rank, world_size, numel)
    if numel:
        for buffer in (BLOCK, *(INBOX if world_size > 1 else ())):
            builder.scratch(buffer, numel, encoded=True)
    builder.encode(Slice(BLOCK, 0, numel), Slice(DATA, 0, numel))
    return builder


def _end(builder: PartBuilder) -> Part:
    """Decode the block that all ranks have."""
    builder.decode(Slice(DATA, 0, builder.numel), Slice(BLOCK, 0, builder.numel))
    return builder.build()


def _inbox(builder: PartBuilder, turn: int) -> Slice:
    return Slice(INBOX[turn % 2], 0, builder.numel)


def steps(p: int) -> SparseSteps:
    """Tree and broadcast: ceil(log2 p) messages up, each merged, and as many down."""
    distances = [1 << shift for shift in range(ceil_log2(p))]
    pairs = [len(range(0, p - distance, 2 * distance)) for distance in distances]
    up = (Round(count, count) for count in pairs)
    down = (Round(count, children=level) for level, count in reversed([*enumerate(pairs, 1)]))
    return SparseSteps(2 * ceil_log2(p), ceil_log2(p), rounds=(*up, *down))


def doubling_steps(p: int) -> SparseSteps:
    """Exchange at doubling distances; folding costs a message and a merge before, and a message after."""
    rounds, power = floor_log2(p), 1 << floor_log2(p)
    before, after = ((Round(p - power, p - power),), (Round(p - power),)) if p != power else ((), ())
    all_rounds = (*before, *(Round(power, power) for _ in range(rounds)), *after)
    return SparseSteps(len(all_rounds), rounds + len(before), rounds=all_rounds)


GTOPK = Strategy("gtopk", {Collective.ALL_REDUCE: all_reduce}, sparse=True, steps=steps)
GTOPK_DOUBLING = Strategy(
    "gtopk_doubling", {Collective.ALL_REDUCE: all_reduce_doubling}, sparse=True, steps=doubling_steps
)
