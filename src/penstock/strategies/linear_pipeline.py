"""Linear pipeline: the ranks form a chain and blocks follow one another along it (Wang et al., section 3, Fig. 2).

A message is cut into k blocks. While a rank passes one block on it receives the next, so all links work at once and
the time hardly depends on the number of ranks: a broadcast or reduce takes p - 1 + k - 1 steps of one block.

    all-reduce of blocks a b c d on 3 ranks; a0 is rank 0's part, a' a partial sum, A the whole sum

    step    1   2   3   4   5   6   7   8   9
    0 -> 1  a0  b0  c0  d0  A   B   C   D
    1 -> 2      a'  b'  c'  d'  A   B   C   D
    2 -> 0          A   B   C   D

A block's sum goes round again as soon as it is finished, so the pipe is filled once: 2k + p - 2 = 9 steps where a
reduce and then a broadcast take 10. Data flows in one direction only and a rank has one source and one target, so
nothing competes for a link. Every rank receives 2n bytes, the first n; the last hop, to the rank that formed the sum,
is the paper's and costs one step (on two ranks it would double the time and is left out). Merging a block overlaps
the receipt of the next.
"""

from penstock.program import Collective, Program, Slice
from penstock.program.builder import ProgramBuilder
from penstock.strategies.options import Options
from penstock.strategies.pipeline import Arrival, Departure, blocks, declare_inbox, emit


def all_reduce(world_size: int, numel: int, options: Options) -> Program:
    """Sum along the chain and send each finished block round again: 2k + p - 2 steps."""
    builder, pieces, block_numel = _start(Collective.ALL_REDUCE, world_size, numel, options, root=0)
    if world_size > 1:
        for rank in range(world_size):
            emit(builder, rank, *_round_trip(rank, world_size, pieces), block_numel)
    return builder.build()


def reduce(world_size: int, numel: int, options: Options) -> Program:
    """Sum along the chain to the root: p - 1 + k - 1 steps, n bytes over each link."""
    builder, pieces, block_numel = _start(Collective.REDUCE, world_size, numel, options, options.root)
    for place in range(world_size):  # the root is the last
        rank, before, after = ((options.root + 1 + place + offset) % world_size for offset in (0, -1, 1))
        arrivals = [Arrival(before, piece, merged=True) for piece in pieces] if place > 0 else []
        departures = _each_after_its_arrival(after, pieces, len(arrivals)) if place < world_size - 1 else []
        emit(builder, rank, arrivals, departures, block_numel)
    return builder.build()


def broadcast(world_size: int, numel: int, options: Options) -> Program:
    """Pass the root's data along the chain: p - 1 + k - 1 steps, n bytes over each link."""
    builder, pieces, block_numel = _start(Collective.BROADCAST, world_size, numel, options, options.root)
    for place in range(world_size):  # the root is the first
        rank, before, after = ((options.root + place + offset) % world_size for offset in (0, -1, 1))
        arrivals = [Arrival(before, piece, merged=False) for piece in pieces] if place > 0 else []
        departures = _each_after_its_arrival(after, pieces, len(arrivals)) if place < world_size - 1 else []
        emit(builder, rank, arrivals, departures, block_numel)
    return builder.build()


def _start(
    collective: Collective, world_size: int, numel: int, options: Options, root: int
) -> tuple[ProgramBuilder, list[Slice], int]:
    """Return a builder, the blocks and the largest size of one."""
    builder = ProgramBuilder("linear_pipeline", collective, world_size, numel, root)
    block_numel = min(options.pipe_block(numel), numel)
    if numel and world_size > 1 and collective is not Collective.BROADCAST:
        declare_inbox(builder, block_numel)
    return builder, blocks(0, numel, block_numel), block_numel


def _each_after_its_arrival(target: int, pieces: list[Slice], arrivals: int) -> list[Departure]:
    return [Departure(target, piece, index if arrivals else -1) for index, piece in enumerate(pieces)]


def _round_trip(rank: int, world_size: int, pieces: list[Slice]) -> tuple[list[Arrival], list[Departure]]:
    """Return what arrives and leaves at one rank of an all-reduce, partial sums and results in turn.

    A block takes p steps to come back to rank 0 as a result. Until then p partial sums leave, after that results and
    partial sums take turns: rank 0's way out never idles, and no rank gets ahead of another by more than a few blocks.
    """
    before, after, last = (rank - 1) % world_size, (rank + 1) % world_size, world_size - 1
    goes_on = rank < last - (1 if world_size == 2 else 0)
    arrivals: list[Arrival] = []
    departures: list[Departure] = []
    for turn in range(len(pieces) + world_size):
        if turn < len(pieces):
            if rank > 0:
                arrivals.append(Arrival(before, pieces[turn], merged=True))
            departures.append(Departure(after, pieces[turn], len(arrivals) - 1))
        if turn >= world_size and (world_size > 2 or rank == 0):
            result = pieces[turn - world_size]
            arrivals.append(Arrival(before, result, merged=False))
            if goes_on:
                departures.append(Departure(after, result, len(arrivals) - 1))
    return arrivals, departures
