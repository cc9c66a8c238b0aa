"""Native: one call of the engine's own collective, to be compared with and to fall back on.

    all-reduce on 2 ranks

    rank 0   0 native data[0:n]
    rank 1   0 native data[0:n]

What travels is the engine's business: no step and no byte of it shows in the program.
"""

from penstock.program import DATA, Collective, Program, Slice
from penstock.program.builder import ProgramBuilder
from penstock.strategies.options import Options


def all_reduce(world_size: int, numel: int, options: Options) -> Program:
    """Call the engine's all-reduce."""
    return _native(Collective.ALL_REDUCE, world_size, numel, 0)


def broadcast(world_size: int, numel: int, options: Options) -> Program:
    """Call the engine's broadcast."""
    return _native(Collective.BROADCAST, world_size, numel, options.root)


def reduce(world_size: int, numel: int, options: Options) -> Program:
    """Call the engine's reduce."""
    return _native(Collective.REDUCE, world_size, numel, options.root)


def reduce_scatter(world_size: int, numel: int, options: Options) -> Program:
    """Call the engine's reduce-scatter."""
    return _native(Collective.REDUCE_SCATTER, world_size, numel, 0)


def all_gather(world_size: int, numel: int, options: Options) -> Program:
    """Call the engine's all-gather."""
    return _native(Collective.ALL_GATHER, world_size, numel, 0)


def _native(collective: Collective, world_size: int, numel: int, root: int) -> Program:
    builder = ProgramBuilder("native", collective, world_size, numel, root)
    for rank in range(world_size):
        builder.native(rank, Slice(DATA, 0, numel))
    return builder.build()
