"""Ring: every rank sends to the next and receives from the one before, so that all links are busy all the time.

The data is cut into one chunk per rank. In the first N-1 steps (reduce-scatter) a chunk travels around the ring and
each rank adds its own part; in the next N-1 (all-gather) the finished chunks travel around once more.

    all-reduce of chunks a b c on 3 ranks; a2 is rank 2's part, a12 the sum of ranks 1 and 2, A the whole sum

    step   0 -> 1   1 -> 2   2 -> 0
    1      a0       b1       c2
    2      c02      a01      b12
    3      B        C        A
    4      A        B        C

After step 2 rank 0 has B, rank 1 C, rank 2 A. 2(N-1) steps, and 2(N-1)/N n bytes over each link: no all-reduce sends
less. A chunk of more than one block is sent block by block, so that merging one overlaps receiving the next. Each
chunk is summed in one order, by one rank at a time, so all ranks end with the same bits.
"""

from penstock.program import Collective, Program, Slice, split
from penstock.program.builder import ProgramBuilder
from penstock.strategies.options import Options
from penstock.strategies.pipeline import DEPTH, Arrival, Departure, blocks, declare_inbox, emit


def all_reduce(world_size: int, numel: int, options: Options) -> Program:
    """Sum over all ranks in 2(N-1) steps."""
    return _ring(Collective.ALL_REDUCE, world_size, numel, options, range(2 * (world_size - 1)), shift=0)


def reduce_scatter(world_size: int, numel: int, options: Options) -> Program:
    """Leave the sum of chunk r on rank r in N-1 steps: the first half of the all-reduce, started one chunk earlier."""
    return _ring(Collective.REDUCE_SCATTER, world_size, numel, options, range(world_size - 1), shift=-1)


def all_gather(world_size: int, numel: int, options: Options) -> Program:
    """Give chunk r of rank r to every rank in N-1 steps: the second half of the all-reduce."""
    return _ring(
        Collective.ALL_GATHER, world_size, numel, options, range(world_size - 1, 2 * (world_size - 1)), shift=-1
    )


def _ring(collective: Collective, world_size: int, numel: int, options: Options, steps: range, shift: int) -> Program:
    """Run `steps` of the 2(N-1): in step s rank r sends chunk r - s + shift; merging ends with step N-2."""
    builder = ProgramBuilder("ring", collective, world_size, numel)
    block_numel = min(options.chunk_block(), -(-numel // world_size))
    chunks = [blocks(start, stop, block_numel) for start, stop in split(numel, world_size)] if numel else []
    if chunks and steps:
        declare_inbox(builder, block_numel)
        for rank in range(world_size):
            arrivals = _arrivals(rank, chunks, steps, shift)
            emit(builder, rank, arrivals, _departures(rank, chunks, steps, shift), block_numel)
    return builder.build()


def _arrivals(rank: int, chunks: list[list[Slice]], steps: range, shift: int) -> list[Arrival]:
    world_size = len(chunks)
    return [
        Arrival((rank - 1) % world_size, block, merged=step < world_size - 1)
        for step in steps
        for block in chunks[(rank - 1 - step + shift) % world_size]
    ]


def _departures(rank: int, chunks: list[list[Slice]], steps: range, shift: int) -> list[Departure]:
    """Send the rank's own chunk, then pass on each block that arrived, never more than `DEPTH` ahead of arrivals.

    Without that limit all ranks could fill their send queues before any of them receives.
    """
    world_size = len(chunks)
    own = chunks[(rank - steps[0] + shift) % world_size]
    passed_on = [arrival.block for arrival in _arrivals(rank, chunks, steps[:-1], shift)]
    last_arrival = len(_arrivals(rank, chunks, steps, shift)) - 1
    departures = []
    for index, block in enumerate(own + passed_on):
        after = max(index - len(own), index - DEPTH)
        departures.append(Departure((rank + 1) % world_size, block, min(after, last_arrival)))
    return departures
