"""Recursive halving and doubling (Rabenseifner): exchange half, then a quarter, and so on; then all the way back.

In each step of the first half a rank sends the half of its data that its partner keeps and adds what it gets to the
half that it keeps itself. At the end each rank has the whole sum of one chunk; the same exchanges backwards collect
the chunks.

    all-reduce of chunks a b c d on 4 ranks; rank r ends the first half with chunk r

    step 1   0 <-> 2, 1 <-> 3   0, 1 keep ab and send cd; 2, 3 keep cd and send ab
    step 2   0 <-> 1, 2 <-> 3   0 keeps a, 1 b, 2 c, 3 d
    step 3   0 <-> 1, 2 <-> 3   0 and 1 have AB, 2 and 3 have CD
    step 4   0 <-> 2, 1 <-> 3   all have ABCD

2 log2 N steps and 2 (N-1)/N n bytes per rank: few startups and the least bytes, for a power of two. Any other number
of ranks is folded. Each chunk is summed by one rank, so all ranks end with the same bits.
"""

from penstock.network import LinearCost, Network
from penstock.program import DATA, Collective, Part, Slice, split
from penstock.program.builder import PartBuilder
from penstock.strategies.closed_form import constants, floor_log2, folding
from penstock.strategies.compress import compressed
from penstock.strategies.recursive_doubling import both_ways, fold, largest_power_of_two, unfold
from penstock.strategies.strategy import DEFAULT, Cut, Options, Strategy

NAME = "halving_doubling"
INBOX = "inbox"


def all_reduce(rank: int, world_size: int, numel: int, options: Options) -> Part:
    """Sum over all ranks in 2 log2 N exchanges of halves, quarters, and so on."""
    builder = PartBuilder(NAME, Collective.ALL_REDUCE, rank, world_size, numel)
    power = largest_power_of_two(world_size)
    builder.units = [Slice(DATA, start, stop) for start, stop in split(numel, power) if start < stop]
    if power > 1:
        builder.scratch(INBOX, numel)
    fold(builder)
    if rank < power:
        distances = [power >> shift for shift in range(1, power.bit_length())]
        for distance in distances:
            _halve(builder, power, distance)
        for distance in reversed(distances):
            _double(builder, power, distance)
    unfold(builder)
    return builder.build()


def _halve(builder: PartBuilder, power: int, distance: int) -> None:
    rank, partner = builder.rank, builder.rank ^ distance
    for source, target in both_ways(rank, partner):
        given = _kept(builder, power, target, distance)
        builder.message(source, target, given, Slice(INBOX, given.start, given.stop))
    kept = _kept(builder, power, rank, distance)
    builder.merge(kept, Slice(INBOX, kept.start, kept.stop))


def _double(builder: PartBuilder, power: int, distance: int) -> None:
    for source, target in both_ways(builder.rank, builder.rank ^ distance):
        own = _kept(builder, power, source, distance)
        builder.message(source, target, own, own)


def _kept(builder: PartBuilder, power: int, rank: int, distance: int) -> Slice:
    """Return what `rank` keeps in the exchange at `distance`: the chunks of the aligned group of that size it is in."""
    first = rank // distance * distance
    return Slice(DATA, builder.numel * first // power, builder.numel * (first + distance) // power)


def cost(network: Network, p: int, options: Options = DEFAULT) -> LinearCost:
    """All-reduce: reduce-scatter by recursive halving, all-gather by recursive doubling (MG-WFBP Table 2)."""
    alpha, beta, gamma = constants(network)
    rounds = floor_log2(p)
    share = 1 - 1 / 2**rounds  # as one factor: Table 2's difference of terms falls below 0 by rounding where p is 1
    return LinearCost(2 * alpha * rounds, share * (2 * beta + gamma)) + folding(network, p)


HALVING_DOUBLING = Strategy(
    NAME,
    {Collective.ALL_REDUCE: all_reduce},
    coded=compressed(all_reduce),
    cut=lambda world_size, _: Cut(largest_power_of_two(world_size)),
    costs={Collective.ALL_REDUCE: cost},
)
