"""Recursive doubling: exchange everything with a partner, at twice the distance each time.

After k steps a rank has the sum of the 2^k ranks that differ from it in the last k bits.

    all-reduce on 4 ranks; 01 is the sum of ranks 0 and 1

    step   0 <-> 1          2 <-> 3
    1      0 -> 1, 1 -> 0   2 -> 3, 3 -> 2      ranks 0, 1 have 01; ranks 2, 3 have 23
    step   0 <-> 2          1 <-> 3
    2      01 -> 2, 23 -> 0 01 -> 3, 23 -> 1    all have 01 + 23

log2 N steps of n bytes each, for a power of two: the best for short messages. Any other number of ranks is folded.
All ranks add the same two halves in the last step, and a + b is b + a to the bit, so all end with the same bits.
"""

from penstock.program import DATA, Collective, Program, Slice
from penstock.program.builder import ProgramBuilder
from penstock.strategies.fold import fold, largest_power_of_two, unfold
from penstock.strategies.options import Options

INBOX = "inbox"


def all_reduce(world_size: int, numel: int, options: Options) -> Program:
    """Sum over all ranks in log2 N exchanges of all the data."""
    builder = ProgramBuilder("recursive_doubling", Collective.ALL_REDUCE, world_size, numel)
    power = largest_power_of_two(world_size)
    if power > 1:
        builder.scratch(INBOX, min(2, power.bit_length() - 1) * numel)
    fold(builder)
    for round_ in range(power.bit_length() - 1):
        _exchange(builder, power, round_)
    unfold(builder)
    return builder.build()


def _exchange(builder: ProgramBuilder, power: int, round_: int) -> None:
    """Exchange with the partner at distance 2^round; two halves of the inbox let the next receive run ahead."""
    data = Slice(DATA, 0, builder.numel)
    start = round_ % 2 * builder.numel
    arrived = Slice(INBOX, start, start + builder.numel)
    for rank in range(power):
        builder.message(rank, rank ^ 1 << round_, data, arrived)
    for rank in range(power):
        builder.merge(rank, data, arrived)
