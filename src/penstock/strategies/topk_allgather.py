"""Top-k all-gather: every rank gets every rank's sparse block and adds them up (gTop-k, Algorithm 1).

    all-reduce on 3 ranks; [0] is rank 0's block of k entries

    step 1   0 -> 1: [0]   1 -> 2: [1]   2 -> 0: [2]
    step 2   0 -> 2: [0]   1 -> 0: [1]   2 -> 1: [2]

In step s every rank sends its own block to the rank s further on: no block waits for another, and no two meet on a
link. N-1 messages and (N-1) 8k bytes each way, so the time grows with N: (N-1)(alpha + 8k beta). The published form
(Eq. 6) counts log2 N startups, for messages that carry several blocks. Blocks are added in the order of the ranks, so
all end with the same bits. The result has between k and N k entries; what a rank did not send is in its residual.
"""

from penstock.program import DATA, Collective, Program, Slice
from penstock.program.builder import ProgramBuilder
from penstock.strategies.options import Options


def all_reduce(world_size: int, numel: int, options: Options) -> Program:
    """Sum the blocks of all ranks on every rank in N-1 steps."""
    builder = ProgramBuilder("topk_allgather", Collective.ALL_REDUCE, world_size, numel)
    if not numel:
        return builder.build()
    data, blocks = Slice(DATA, 0, numel), [Slice(f"block{rank}", 0, numel) for rank in range(world_size)]
    for block in blocks:
        builder.scratch(block.buffer, numel, encoded=True)
    for rank in range(world_size):
        builder.encode(rank, blocks[rank], data)
        for step in range(1, world_size):
            source = (rank - step) % world_size
            builder.recv(rank, source, blocks[source])
            builder.send(rank, (rank + step) % world_size, blocks[rank])
        builder.decode(rank, data, blocks[0])
        for block in blocks[1:]:
            builder.merge(rank, data, block)
    return builder.build()
