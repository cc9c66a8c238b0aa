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

from penstock.program import DATA, Collective, Program, Slice
from penstock.program.builder import ProgramBuilder
from penstock.strategies.options import Options

INBOX = "inbox"


def all_reduce(world_size: int, numel: int, options: Options) -> Program:
    """Sum over all ranks in 2 ceil(log2 N) steps."""
    builder = ProgramBuilder("binary_tree", Collective.ALL_REDUCE, world_size, numel)
    if world_size > 1:
        builder.scratch(INBOX, numel)
    data, arrived = Slice(DATA, 0, numel), Slice(INBOX, 0, numel)
    rounds = [1 << shift for shift in range((world_size - 1).bit_length())]
    for distance in rounds:
        for parent in range(0, world_size - distance, 2 * distance):
            builder.message(parent + distance, parent, data, arrived)
            builder.merge(parent, data, arrived)
    for distance in reversed(rounds):
        for parent in range(0, world_size - distance, 2 * distance):
            builder.message(parent, parent + distance, data, data, in_turn=True)
    return builder.build()
