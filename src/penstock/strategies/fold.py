"""Folding: how algorithms for a power of two ranks serve any number.

The ranks beyond the largest power of two hand their data to a partner first and get the result from it at the end:

    5 ranks: 4 -> 0 (merged), then 0 1 2 3 go on as four, then 0 -> 4

Two more steps and 2n bytes over the links that fold; nothing for a power of two.
"""

from penstock.program import DATA, Slice
from penstock.program.builder import ProgramBuilder

FOLD = "fold"


def largest_power_of_two(world_size: int) -> int:
    """Return the number of ranks that stay."""
    return 1 << world_size.bit_length() - 1


def fold(builder: ProgramBuilder) -> None:
    """Merge the data of each rank beyond the power of two into its partner's."""
    power = largest_power_of_two(builder.world_size)
    data, arrived = Slice(DATA, 0, builder.numel), Slice(FOLD, 0, builder.numel)
    if builder.world_size > power:
        builder.scratch(FOLD, builder.numel)
    for extra in range(power, builder.world_size):
        builder.message(extra, extra - power, data, arrived)
        builder.merge(extra - power, data, arrived)


def unfold(builder: ProgramBuilder) -> None:
    """Send the result to the ranks that were folded."""
    power = largest_power_of_two(builder.world_size)
    data = Slice(DATA, 0, builder.numel)
    for extra in range(power, builder.world_size):
        builder.message(extra - power, extra, data, data)
