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

from penstock.network import LinearCost, Network
from penstock.program import Collective, Part, Slice, split
from penstock.program.builder import PartBuilder
from penstock.strategies.closed_form import SyncCounts, constants
from penstock.strategies.compress import compressed
from penstock.strategies.pipeline import DEPTH, Arrival, Departure, blocks, declare_inbox, emit
from penstock.strategies.strategy import DEFAULT, Options, Strategy, one_chunk_per_rank

NAME = "ring"


def all_reduce(rank: int, world_size: int, numel: int, options: Options) -> Part:
    """Sum over all ranks in 2(N-1) steps."""
    steps = range(2 * (world_size - 1))
    return _ring(_builder(Collective.ALL_REDUCE, rank, world_size, numel), options, steps, shift=0)


def reduce_scatter(rank: int, world_size: int, numel: int, options: Options) -> Part:
    """Leave the sum of chunk r on rank r in N-1 steps: the first half of the all-reduce, started one chunk earlier."""
    return _ring(_builder(Collective.REDUCE_SCATTER, rank, world_size, numel), options, range(world_size - 1), shift=-1)


def all_gather(rank: int, world_size: int, numel: int, options: Options) -> Part:
    """Give chunk r of rank r to every rank in N-1 steps: the second half of the all-reduce."""
    steps = range(world_size - 1, 2 * (world_size - 1))
    return _ring(_builder(Collective.ALL_GATHER, rank, world_size, numel), options, steps, shift=-1)


def _builder(collective: Collective, rank: int, world_size: int, numel: int) -> PartBuilder:
    return PartBuilder(NAME, collective, rank, world_size, numel)


def _ring(builder: PartBuilder, options: Options, steps: range, shift: int) -> Part:
    """Run `steps` of the 2(N-1): in step s rank r sends chunk r - s + shift; merging ends with step N-2."""
    numel, world_size = builder.numel, builder.world_size
    block_numel = min(options.chunk_block(), -(-numel // world_size))
    chunks = [blocks(start, stop, block_numel) for start, stop in split(numel, world_size)] if numel else []
    builder.units = [block for chunk in chunks for block in chunk]
    if chunks and steps:
        declare_inbox(builder, block_numel)
        arrivals = _arrivals(builder.rank, chunks, steps, shift)
        emit(builder, arrivals, _departures(builder.rank, chunks, arrivals, steps, shift), block_numel)
    return builder.build()


def _arrivals(rank: int, chunks: list[list[Slice]], steps: range, shift: int) -> list[Arrival]:
    world_size = len(chunks)
    return [
        Arrival((rank - 1) % world_size, block, step < world_size - 1)
        for step in steps
        for block in chunks[(rank - 1 - step + shift) % world_size]
    ]


def _departures(
    rank: int, chunks: list[list[Slice]], arrivals: list[Arrival], steps: range, shift: int
) -> list[Departure]:
    """Send the rank's own chunk, then pass on each block that arrived, never more than `DEPTH` ahead of arrivals.

    Without that limit all ranks could fill their send queues before any of them receives. A sum is finished after N-1
    steps: from then on what leaves replaces what the next rank has.
    """
    world_size = len(chunks)
    own = chunks[(rank - steps[0] + shift) % world_size]
    last = chunks[(rank - 1 - steps[-1] + shift) % world_size]  # arrives in the last step and stays
    leaving = own + [arrival.block for arrival in arrivals[: len(arrivals) - len(last)]]
    first_finished = sum(len(chunks[(rank - step + shift) % world_size]) for step in steps if step < world_size - 1)
    limit, ahead = len(arrivals) - 1, min(len(own), DEPTH)
    target = (rank + 1) % world_size
    return [
        Departure(target, block, min(index - ahead, limit), index >= first_finished)
        for index, block in enumerate(leaving)
    ]


def cost(network: Network, p: int, options: Options = DEFAULT) -> LinearCost:
    """All-reduce: p-1 steps to sum a p-th part each, p-1 steps to pass the sums on (MG-WFBP Table 2)."""
    alpha, beta, gamma = constants(network)
    share = (p - 1) / p
    return LinearCost(2 * (p - 1) * alpha, 2 * share * beta + share * gamma)


def counts(workers: int, pieces: int) -> SyncCounts:
    """CaSync-Ring (HiPress Table 3): 2(N-1) sends; N encodes and N decodes that no transmission hides."""
    return SyncCounts(2 * (workers - 1), workers, workers)


RING = Strategy(
    NAME,
    {
        Collective.ALL_REDUCE: all_reduce,
        Collective.REDUCE_SCATTER: reduce_scatter,
        Collective.ALL_GATHER: all_gather,
    },
    coded=compressed(all_reduce),
    options=("serial",),
    cut=one_chunk_per_rank,
    costs={Collective.ALL_REDUCE: cost},
    counts=counts,
)
