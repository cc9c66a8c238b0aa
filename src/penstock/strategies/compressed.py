"""Compressed all-reduces by name: the tensors of a bucket cut into batches, and a program that counts these.

    program, batches = build_compressed("ring", 4, [0, 1_000_000, 1_000_064])

`compress` makes the program of the dense strategy's; here is what each strategy wants its data cut into. Sparse ones
cut nothing: every tensor has one block, of its own k largest entries, and all blocks of a bucket travel together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from penstock.errors import StrategyError
from penstock.program import Program
from penstock.strategies import SPARSE, build, parameter_server
from penstock.strategies.batches import Batches, make_batches, one_batch
from penstock.strategies.compress import compress
from penstock.strategies.fold import largest_power_of_two
from penstock.strategies.options import Options

BLOCK = 512 * 1024  # elements of a batch; see LARGEST_PIECE


def build_compressed(
    name: str, world_size: int, bounds: Sequence[int], options: Options | None = None
) -> tuple[Program, Batches]:
    """Return the compressed all-reduce of the tensors between `bounds`, and the batches that its positions stand for.

    `options.partitions` is the number of pieces of each tensor (HiPress's K), `options.block_numel` about how many
    elements travel together.
    """
    options, name = options or Options(), name.replace("-", "_")
    if ("all_reduce", name) in SPARSE:
        batches = one_batch(bounds)
        return build("all_reduce", name, world_size, len(batches.pieces), options), batches
    if name not in CHUNKS:
        known = (*CHUNKS, *(sparse for _, sparse in SPARSE))
        raise StrategyError(f"no compressed strategy {name!r}; known: {', '.join(known)}")
    chunks, waves = CHUNKS[name](world_size, options), name == parameter_server.NAME
    batches = make_batches(bounds, chunks, options.partitions, options.block_numel or BLOCK, waves)
    count = len(batches.pieces)
    dense = build("all_reduce", name, world_size, count, replace(options, block_numel=1, partitions=max(count, 1)))
    return compress(dense, batches.empty), batches


def _one(_world_size: int, _options: Options) -> int:
    return 1


CHUNKS: Mapping[str, Callable[[int, Options], int]] = {  # how many equal parts each strategy cuts data into
    "ring": lambda world_size, _: world_size,
    "parameter_server": lambda world_size, options: len(parameter_server.aggregators(world_size, options.servers)),
    "halving_doubling": lambda world_size, _: largest_power_of_two(world_size),
    "bidirectional_exchange": lambda world_size, _: world_size,
    "double_tree": lambda _, __: 2,
    "linear_pipeline": _one,
    "binary_tree": _one,
    "spanning_tree": _one,
}
