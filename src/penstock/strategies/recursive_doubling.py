"""Recursive doubling: exchange everything with a partner, at twice the distance each time.

After k steps a rank has the sum of the 2^k ranks that differ from it in the last k bits.

    all-reduce on 4 ranks; 01 is the sum of ranks 0 and 1

    step   0 <-> 1          2 <-> 3
    1      0 -> 1, 1 -> 0   2 -> 3, 3 -> 2      ranks 0, 1 have 01; ranks 2, 3 have 23
    step   0 <-> 2          1 <-> 3
    2      01 -> 2, 23 -> 0 01 -> 3, 23 -> 1    all have 01 + 23

log2 N steps of n bytes each, for a power of two: the best for short messages. Any other number of ranks is folded:
those beyond the largest power of two hand their data to a partner first and get the result from it at the end.

    5 ranks: 4 -> 0 (merged), then 0 1 2 3 go on as four, then 0 -> 4

Folding takes two more steps and 2n bytes over the links that fold; nothing for a power of two.
All ranks add the same two halves in the last step, and a + b is b + a to the bit, so all end with the same bits.
"""

from penstock.network import LinearCost, Network
from penstock.program import DATA, Collective, Part, Slice
from penstock.program.builder import PartBuilder
from penstock.strategies import gather
from penstock.strategies.closed_form import constants, floor_log2, folding
from penstock.strategies.strategy import DEFAULT, Options, Strategy

NAME = "recursive_doubling"
INBOX = "inbox"
FOLD = "fold"


def all_reduce(rank: int, world_size: int, numel: int, options: Options) -> Part:
    """Sum over all ranks in log2 N exchanges of all the data."""
    builder = PartBuilder(NAME, Collective.ALL_REDUCE, rank, world_size, numel)
    power = largest_power_of_two(world_size)
    if power > 1:
        builder.scratch(INBOX, min(2, power.bit_length() - 1) * numel)
    fold(builder)
    if rank < power:
        for round_ in range(power.bit_length() - 1):
            _exchange(builder, round_)
    unfold(builder)
    return builder.build()


def _exchange(builder: PartBuilder, round_: int) -> None:
    """Exchange with the partner at distance 2^round; two halves of the inbox let the next receive run ahead."""
    data = Slice(DATA, 0, builder.numel)
    start = round_ % 2 * builder.numel
    arrived = Slice(INBOX, start, start + builder.numel)
    partner = builder.rank ^ 1 << round_
    for source, target in both_ways(builder.rank, partner):
        builder.message(source, target, data, arrived)
    builder.merge(data, arrived)


def both_ways(rank: int, partner: int) -> list[tuple[int, int]]:
    """Return the two messages of an exchange as (source, target), that of the lower rank first."""
    low, high = sorted((rank, partner))
    return [(low, high), (high, low)]


def largest_power_of_two(world_size: int) -> int:
    """Return the number of ranks that stay when the others are folded."""
    return 1 << floor_log2(world_size)


def fold(builder: PartBuilder) -> None:
    """Merge the data of each rank beyond the power of two into its partner's."""
    power = largest_power_of_two(builder.world_size)
    data, arrived = Slice(DATA, 0, builder.numel), Slice(FOLD, 0, builder.numel)
    if builder.world_size > power:
        builder.scratch(FOLD, builder.numel)
    if (extra := _folded(builder, power)) is not None:
        builder.message(extra, extra - power, data, arrived)
        if builder.rank < power:
            builder.merge(data, arrived)


def unfold(builder: PartBuilder) -> None:
    """Send the result to the ranks that were folded."""
    power = largest_power_of_two(builder.world_size)
    data = Slice(DATA, 0, builder.numel)
    if (extra := _folded(builder, power)) is not None:
        builder.message(extra - power, extra, data, data)


def _folded(builder: PartBuilder, power: int) -> int | None:
    """Return the folded rank of the pair that this rank is in; None where it is in none."""
    extra = builder.rank if builder.rank >= power else builder.rank + power
    return extra if extra < builder.world_size else None


def cost(network: Network, p: int, options: Options = DEFAULT) -> LinearCost:
    """All-reduce: pairs at doubling distances exchange and add the whole message (MG-WFBP Table 2)."""
    alpha, beta, gamma = constants(network)
    rounds = floor_log2(p)
    return LinearCost(alpha * rounds, (beta + gamma) * rounds) + folding(network, p)


RECURSIVE_DOUBLING = Strategy(
    NAME,
    {Collective.ALL_REDUCE: all_reduce},
    coded=gather.doubling,
    costs={Collective.ALL_REDUCE: cost},
    counts=gather.counts,
)
