"""Compressed all-reduces by name: the tensors of a bucket cut into batches, and a program that counts these.

    program, batches = build_compressed("ring", 4, [0, 1_000_000, 1_000_064])

`compress` makes the program of the dense strategy's, `gather` has those that are not made so, and `hierarchical` is
dense inside nodes and compressed between them. Here is what each strategy wants its data cut into. Sparse ones cut
nothing: every tensor has one block, of its own k largest entries, and all blocks of a bucket travel together.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from penstock.errors import StrategyError
from penstock.program import Program
from penstock.strategies import SPARSE, build, gather, hierarchical, parameter_server
from penstock.strategies.batches import Batches, make_batches, one_batch
from penstock.strategies.compress import compress, without
from penstock.strategies.fold import largest_power_of_two
from penstock.strategies.options import Options

BLOCK = 1024 * 1024  # elements of a batch where nobody chose


def build_compressed(
    name: str, world_size: int, bounds: Sequence[int], options: Options | None = None
) -> tuple[Program, Batches]:
    """Return the compressed all-reduce of the tensors between `bounds`, and the batches that its positions stand for.

    `options.partitions` is the number of pieces of each tensor (HiPress's K), `options.block_numel` about how many
    elements travel together.
    """
    options, name = options or Options(), name.replace("-", "_")
    if ("all_reduce", options.outer if name == hierarchical.NAME else name) in SPARSE:
        batches = one_batch(bounds)
        return compressed_program(name, world_size, len(batches.pieces), options), batches
    if name not in CHUNKS:
        known = (*CHUNKS, *(sparse for _, sparse in SPARSE))
        raise StrategyError(f"no compressed strategy {name!r}; known: {', '.join(known)}")
    chunks = CHUNKS[name](world_size, options)
    waves = (options.outer if name == hierarchical.NAME else name) == parameter_server.NAME
    batches = make_batches(bounds, chunks, options.partitions, options.block_numel or BLOCK, waves)
    count = len(batches.pieces)
    options = replace(options, block_numel=1, partitions=max(count, 1))
    program = compressed_program(name, world_size, count, options, batches.empty)
    return without(program, batches.empty), batches.filled


def compressed_program(
    name: str, world_size: int, numel: int, options: Options, empty: Collection[int] = ()
) -> Program:
    """Return the compressed all-reduce called `name` of `numel` positions, be they elements or batches."""
    if ("all_reduce", name) in SPARSE:
        return build("all_reduce", name, world_size, numel, options)
    if name in GATHERS:
        return GATHERS[name](world_size, numel, options, empty)
    if name == hierarchical.NAME:
        return _hierarchical(world_size, numel, options, empty)
    return compress(build("all_reduce", name, world_size, numel, options), empty)


def _hierarchical(world_size: int, numel: int, options: Options, empty: Collection[int]) -> Program:
    """Local aggregation (HiPress, section 5): the ranks of a node aggregate dense, their first talks compressed."""
    if options.inner != "spanning_tree":
        raise StrategyError(f"hierarchical with a codec: inner strategy {options.inner!r}; wanted spanning_tree")

    def make(operation: str, name: str, ranks: int, size: int, part: Options) -> Program:
        if operation == "all_reduce":
            return compressed_program(name, ranks, size, part, empty)
        return build(operation, name, ranks, size, part)

    return hierarchical.all_reduce(world_size, numel, options, make)


def _one(_world_size: int, _options: Options) -> int:
    return 1


GATHERS: Mapping[str, Callable[[int, int, Options, Collection[int]], Program]] = {
    "all_gather": gather.all_gather,
    "recursive_doubling": gather.recursive_doubling,
}
CHUNKS: Mapping[str, Callable[[int, Options], int]] = {  # how many equal parts each strategy cuts data into
    "ring": lambda world_size, _: world_size,
    "parameter_server": lambda world_size, options: len(parameter_server.aggregators(world_size, options.servers)),
    "halving_doubling": lambda world_size, _: largest_power_of_two(world_size),
    "bidirectional_exchange": lambda world_size, _: world_size,
    "double_tree": lambda _, __: 2,
    "linear_pipeline": _one,
    "binary_tree": _one,
    "spanning_tree": _one,
    "all_gather": _one,
    "recursive_doubling": _one,
    "hierarchical": lambda world_size, options: CHUNKS[options.outer](
        len(hierarchical.leaders(world_size, options)), options
    ),
}
