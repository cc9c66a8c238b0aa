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

from penstock.network import LinearCost, Network
from penstock.program import Collective, Part, Slice
from penstock.program.builder import PartBuilder
from penstock.strategies.closed_form import ZERO, constants
from penstock.strategies.compress import compressed
from penstock.strategies.pipeline import Arrival, Departure, blocks, declare_inbox, emit
from penstock.strategies.strategy import DEFAULT, Options, Strategy

NAME = "linear_pipeline"
DEFAULT_BLOCK_NBYTES = 256 * 1024  # of the closed form: `LARGEST_BLOCK` elements of float32


def all_reduce(rank: int, world_size: int, numel: int, options: Options) -> Part:
    """Sum along the chain and send each finished block round again: 2k + p - 2 steps."""
    builder, pieces, block_numel = _start(Collective.ALL_REDUCE, rank, world_size, numel, options, root=0)
    builder.units = pieces
    if world_size > 1:
        emit(builder, *_round_trip(rank, world_size, pieces), block_numel)
    return builder.build()


def reduce(rank: int, world_size: int, numel: int, options: Options) -> Part:
    """Sum along the chain to the root: p - 1 + k - 1 steps, n bytes over each link."""
    builder, pieces, block_numel = _start(Collective.REDUCE, rank, world_size, numel, options, options.root)
    _pass_on(builder, pieces, block_numel, (rank - options.root - 1) % world_size, merged=True)  # the root is the last
    return builder.build()


def broadcast(rank: int, world_size: int, numel: int, options: Options) -> Part:
    """Pass the root's data along the chain: p - 1 + k - 1 steps, n bytes over each link."""
    builder, pieces, block_numel = _start(Collective.BROADCAST, rank, world_size, numel, options, options.root)
    _pass_on(builder, pieces, block_numel, (rank - options.root) % world_size, merged=False)  # the root is the first
    return builder.build()


def _start(
    collective: Collective, rank: int, world_size: int, numel: int, options: Options, root: int
) -> tuple[PartBuilder, list[Slice], int]:
    """Return a builder, the blocks and the largest size of one."""
    builder = PartBuilder(NAME, collective, rank, world_size, numel, root)
    block_numel = min(options.pipe_block(numel), numel)
    if numel and world_size > 1 and collective is not Collective.BROADCAST:
        declare_inbox(builder, block_numel)
    return builder, blocks(0, numel, block_numel), block_numel


def _pass_on(builder: PartBuilder, pieces: list[Slice], block_numel: int, place: int, merged: bool) -> None:
    """Receive every block from the rank before and send it to the one after; `place` counts along the chain."""
    before, after = ((builder.rank + step) % builder.world_size for step in (-1, 1))
    arrivals = [Arrival(before, piece, merged) for piece in pieces] if place > 0 else []
    leaves = pieces if place < builder.world_size - 1 else []
    departures = [Departure(after, piece, index if arrivals else -1) for index, piece in enumerate(leaves)]
    emit(builder, arrivals, departures, block_numel)


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
            departures.append(Departure(after, pieces[turn], len(arrivals) - 1, finished=rank == last))
        if turn >= world_size and (world_size > 2 or rank == 0):
            result = pieces[turn - world_size]
            arrivals.append(Arrival(before, result, merged=False))
            if goes_on:
                departures.append(Departure(after, result, len(arrivals) - 1, finished=True))
    return arrivals, departures


def cost(
    network: Network, p: int, options: Options = DEFAULT, block_nbytes: float = DEFAULT_BLOCK_NBYTES
) -> LinearCost:
    """All-reduce in blocks: 2(p-1+n/b) alpha + (b(p-1)+n)(2 beta + gamma), a line in n (Wang et al. Table 1).

    Between two ranks it is half of that: blocks go one way and sums the other, at the same time.
    """
    if p == 2:
        return reduce_cost(network, p, options, block_nbytes)
    return reduce_cost(network, p, options, block_nbytes) + broadcast_cost(network, p, options, block_nbytes)


def broadcast_cost(
    network: Network, p: int, options: Options = DEFAULT, block_nbytes: float = DEFAULT_BLOCK_NBYTES
) -> LinearCost:
    """Broadcast in blocks: (p-1+n/b) alpha + (b(p-1)+n) beta."""
    alpha, beta, _ = constants(network)
    return _pipeline(alpha, beta, p, block_nbytes)


def reduce_cost(
    network: Network, p: int, options: Options = DEFAULT, block_nbytes: float = DEFAULT_BLOCK_NBYTES
) -> LinearCost:
    """Reduce in blocks: (p-1+n/b) alpha + (b(p-1)+n)(beta + gamma)."""
    alpha, beta, gamma = constants(network)
    return _pipeline(alpha, beta + gamma, p, block_nbytes)


def _pipeline(alpha: float, per_byte: float, p: int, block_nbytes: float) -> LinearCost:
    if p == 1:
        return ZERO
    return LinearCost((p - 1) * (alpha + block_nbytes * per_byte), alpha / block_nbytes + per_byte)


def best_block_nbytes(network: Network, p: int, nbytes: float, collective: Collective = Collective.ALL_REDUCE) -> float:
    """Return the block size that minimises the cost.

    The terms that depend on b are `n alpha / b` and `b (p-1) s`, where s is what a byte costs on its way; they are
    least where they are equal: b = sqrt(n alpha / ((p-1) s)). Erratum 9: Proposition 1 asks for n/b << alpha, which
    compares a count with a time; what it needs is n alpha / b << n beta, and the optimum follows from the cost.
    """
    alpha, beta, gamma = constants(network)
    if p == 2 and collective is Collective.ALL_REDUCE:
        collective = Collective.REDUCE  # which takes as long
    startups, per_byte = {
        Collective.BROADCAST: (1, beta),
        Collective.REDUCE: (1, beta + gamma),
        Collective.ALL_REDUCE: (2, 2 * beta + gamma),
    }[collective]
    if p == 1 or nbytes == 0 or per_byte == 0:
        return max(nbytes, 1.0)
    return float(min(max((startups * nbytes * alpha / ((p - 1) * per_byte)) ** 0.5, 1.0), nbytes))


LINEAR_PIPELINE = Strategy(
    NAME,
    {Collective.ALL_REDUCE: all_reduce, Collective.BROADCAST: broadcast, Collective.REDUCE: reduce},
    coded=compressed(all_reduce),
    costs={Collective.ALL_REDUCE: cost, Collective.BROADCAST: broadcast_cost, Collective.REDUCE: reduce_cost},
)
