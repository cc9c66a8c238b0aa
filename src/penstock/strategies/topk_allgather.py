"""Top-k all-gather: every rank gets every rank's sparse block and adds them up (gTop-k, Algorithm 1).

    all-reduce on 3 ranks; [0] is rank 0's block of k entries

    step 1   0 -> 1: [0]   1 -> 2: [1]   2 -> 0: [2]
    step 2   0 -> 2: [0]   1 -> 0: [1]   2 -> 1: [2]

In step s every rank sends its own block to the rank s further on: no block waits for another, and no two meet on a
link. N-1 messages and (N-1) 8k bytes each way, so the time grows with N: (N-1)(alpha + 8k beta). The published form
(Eq. 6) counts log2 N startups, for messages that carry several blocks. Blocks are added in the order of the ranks, so
all end with the same bits. The result has between k and N k entries; what a rank did not send is in its residual.
"""

from penstock.program import DATA, Collective, Part, Slice
from penstock.program.builder import PartBuilder
from penstock.strategies.closed_form import SparseSteps
from penstock.strategies.strategy import Options, Strategy

NAME = "topk_allgather"


def all_reduce(rank: int, world_size: int, numel: int, options: Options) -> Part:
    """Sum the blocks of all ranks on every rank in N-1 steps."""
    builder = PartBuilder(NAME, Collective.ALL_REDUCE, rank, world_size, numel)
    if not numel:
        return builder.build()
    data, blocks = Slice(DATA, 0, numel), [Slice(f"block{one}", 0, numel) for one in range(world_size)]
    for block in blocks:
        builder.scratch(block.buffer, numel, encoded=True)
    builder.encode(blocks[rank], data)
    for step in range(1, world_size):
        source = (rank - step) % world_size
        builder.recv(source, blocks[source])
        builder.send((rank + step) % world_size, blocks[rank])
    builder.decode(data, blocks[0])
    for block in blocks[1:]:
        builder.merge(data, block)
    return builder.build()


def steps(p: int) -> SparseSteps:
    """N-1 messages on every NIC, then N-1 blocks are added to the first."""
    return SparseSteps(p - 1, adds=p - 1)


TOPK_ALLGATHER = Strategy(NAME, {Collective.ALL_REDUCE: all_reduce}, sparse=True, steps=steps)
