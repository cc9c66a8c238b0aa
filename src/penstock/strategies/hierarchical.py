"""Hierarchical: sum inside each node, all-reduce between the nodes, send the result back inside each node.

A node is `ranks_per_node` consecutive ranks, the last perhaps fewer, and its first rank leads it. Links inside a node
are fast, so all of the data may cross them in full; between the leaders any all-reduce will do, a compressed one too.

    6 ranks, 2 per node, spanning tree inside, ring between

    step 1     1 -> 0   3 -> 2   5 -> 4       reduce inside the nodes
    step 2-5   ring over ranks 0, 2, 4        2 (3-1) steps of a third of the data
    step 6     0 -> 1   2 -> 3   4 -> 5       broadcast inside the nodes

A link between nodes carries what the outer strategy sends on that many nodes; a link inside carries n bytes each way.
"""

from collections.abc import Callable
from dataclasses import replace

from penstock.errors import StrategyError
from penstock.program import Collective, Program, ProgramBuilder
from penstock.strategies.options import Options

NAME = "hierarchical"
Build = Callable[[str, str, int, int, Options], Program]  # (operation, name, world_size, numel, options)


def all_reduce(world_size: int, numel: int, options: Options, build: Build) -> Program:
    """Join three programs of other strategies, which `build` makes."""
    for name in (options.inner, options.outer):
        if name in ("native", NAME):
            raise StrategyError(f"hierarchical: {name} cannot be a part of it; choose another inner or outer strategy")
    builder = ProgramBuilder(NAME, Collective.ALL_REDUCE, world_size, numel)
    size, part_options = options.ranks_per_node, replace(options, root=0)
    nodes = [range(first, min(first + size, world_size)) for first in range(0, world_size, size)]
    for node in nodes:
        builder.include(build("reduce", options.inner, len(node), numel, part_options), node, "reduce")
    leaders = [node[0] for node in nodes]
    builder.include(build("all_reduce", options.outer, len(leaders), numel, part_options), leaders, "between")
    for node in nodes:
        builder.include(build("broadcast", options.inner, len(node), numel, part_options), node, "broadcast")
    return builder.build()
