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

from penstock.program import DATA, Collective, Program, Slice, split
from penstock.program.builder import ProgramBuilder
from penstock.strategies.fold import fold, largest_power_of_two, unfold
from penstock.strategies.options import Options

INBOX = "inbox"


def all_reduce(world_size: int, numel: int, options: Options) -> Program:
    """Sum over all ranks in 2 log2 N exchanges of halves, quarters, and so on."""
    builder = ProgramBuilder("halving_doubling", Collective.ALL_REDUCE, world_size, numel)
    power = largest_power_of_two(world_size)
    if power > 1:
        builder.scratch(INBOX, numel)
    fold(builder)
    distances = [power >> shift for shift in range(1, power.bit_length())]
    for distance in distances:
        _halve(builder, power, distance)
    for distance in reversed(distances):
        _double(builder, power, distance)
    unfold(builder)
    return builder.build()


def _halve(builder: ProgramBuilder, power: int, distance: int) -> None:
    for rank in range(power):
        partner = rank ^ distance
        given = _kept(builder, power, partner, distance)
        builder.message(rank, partner, given, Slice(INBOX, given.start, given.stop))
    for rank in range(power):
        kept = _kept(builder, power, rank, distance)
        builder.merge(rank, kept, Slice(INBOX, kept.start, kept.stop))


def _double(builder: ProgramBuilder, power: int, distance: int) -> None:
    for rank in range(power):
        own = _kept(builder, power, rank, distance)
        builder.message(rank, rank ^ distance, own, own)


def _kept(builder: ProgramBuilder, power: int, rank: int, distance: int) -> Slice:
    """Return what `rank` keeps in the exchange at `distance`: the chunks of the aligned group of that size it is in."""
    first = rank // distance * distance
    chunks = split(builder.numel, power)
    return Slice(DATA, chunks[first][0], chunks[first + distance - 1][1])
