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
result, and loses the rest (erratum 4); the proof finds a program that keeps nothing (`values kept by nobody`).
"""

from penstock.program import DATA, Collective, Program, Slice
from penstock.program.builder import ProgramBuilder
from penstock.strategies.fold import largest_power_of_two
from penstock.strategies.options import Options

BLOCK = "block"
INBOX = ("inbox0", "inbox1")  # in turn, so that the next receive runs ahead of a merge


def all_reduce(world_size: int, numel: int, options: Options) -> Program:
    """Merge up a tree to rank 0 and send the block down again: 2 ceil(log2 N) steps of one block."""
    builder = _begin("gtopk", world_size, numel)
    rounds = [1 << shift for shift in range((world_size - 1).bit_length())] if numel else []
    block = Slice(BLOCK, 0, numel)
    for turn, distance in enumerate(rounds):
        for parent in range(0, world_size - distance, 2 * distance):
            arrived = _inbox(builder, turn)
            builder.message(parent + distance, parent, block, arrived)
            builder.merge(parent, block, arrived)
    for distance in reversed(rounds):
        for parent in range(0, world_size - distance, 2 * distance):
            builder.message(parent, parent + distance, block, block, in_turn=True)
    return _end(builder)


def all_reduce_doubling(world_size: int, numel: int, options: Options) -> Program:
    """Exchange and merge at doubling distances: log2 N steps of one block, and two more where ranks are folded."""
    builder = _begin("gtopk_doubling", world_size, numel)
    power, block = largest_power_of_two(world_size), Slice(BLOCK, 0, numel)
    for extra in range(power, world_size):
        builder.message(extra, extra - power, block, _inbox(builder, 1))
        builder.merge(extra - power, block, _inbox(builder, 1))
    for turn in range(power.bit_length() - 1):
        _exchange(builder, power, turn)
    for extra in range(power, world_size):
        builder.message(extra - power, extra, block, block)
    return _end(builder)


def _exchange(builder: ProgramBuilder, power: int, turn: int) -> None:
    """Merge with the partner at distance 2^turn; of the ranks that then hold the same block the first keeps."""
    block, arrived, alike = Slice(BLOCK, 0, builder.numel), _inbox(builder, turn), 2 << turn
    for rank in range(power):
        builder.message(rank, rank ^ 1 << turn, block, arrived)
    for rank in range(power):
        builder.merge(rank, block, arrived, keeps=rank % alike == 0)


def _begin(name: str, world_size: int, numel: int) -> ProgramBuilder:
    """Start with each rank's own block."""
    builder = ProgramBuilder(name, Collective.ALL_REDUCE, world_size, numel)
    if numel:
        for buffer in (BLOCK, *(INBOX if world_size > 1 else ())):
            builder.scratch(buffer, numel, encoded=True)
    for rank in range(world_size):
        builder.encode(rank, Slice(BLOCK, 0, numel), Slice(DATA, 0, numel))
    return builder


def _end(builder: ProgramBuilder) -> Program:
    """Let every rank decode the block that all of them have."""
    for rank in range(builder.world_size):
        builder.decode(rank, Slice(DATA, 0, builder.numel), Slice(BLOCK, 0, builder.numel))
    return builder.build()


def _inbox(builder: ProgramBuilder, turn: int) -> Slice:
    return Slice(INBOX[turn % 2], 0, builder.numel)
