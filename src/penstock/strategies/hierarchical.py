"""Hierarchical: sum inside each node, all-reduce between the nodes, send the result back inside each node.

A node is `ranks_per_node` consecutive ranks, the last perhaps fewer, or what `nodes` says: any groups of ranks that
hold each once, such as the hosts that ranks were found on (`runtime/hosts.py`). Its first rank leads it. Links inside a
node are fast, so all of the data may cross them in full; between the leaders any all-reduce will do, a compressed one
too.

    6 ranks, 2 per node, spanning tree inside, ring between

    step 1     1 -> 0   3 -> 2   5 -> 4       reduce inside the nodes
    step 2-5   ring over ranks 0, 2, 4        2 (3-1) steps of a third of the data
    step 6     0 -> 1   2 -> 3   4 -> 5       broadcast inside the nodes

A link between nodes carries what the outer strategy sends on that many nodes; a link inside carries n bytes each way.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.errors import StrategyError
from penstock.program import Collective, Program
from penstock.program.builder import ProgramBuilder
from penstock.strategies.options import Options

NAME = "hierarchical"
Build = Callable[[str, str, int, int, Options], Program]  # (operation, name, world_size, numel, options)


def all_reduce(world_size: int, numel: int, options: Options, build: Build) -> Program:
    """Join three programs of other strategies, which `build` makes."""
    for name in (options.inner, options.outer):
        if name in ("native", NAME):
            raise StrategyError(f"hierarchical: {name} cannot be a part of it; choose another inner or outer strategy")
    builder = ProgramBuilder(NAME, Collective.ALL_REDUCE, world_size, numel)
    nodes, part_options = split_nodes(world_size, options), replace(options, root=0)
    for node in nodes:
        builder.include(build("reduce", options.inner, len(node), numel, part_options), node, "reduce")
    first = leaders(world_size, options)
    builder.include(build("all_reduce", options.outer, len(first), numel, part_options), first, "between")
    for node in nodes:
        builder.include(build("broadcast", options.inner, len(node), numel, part_options), node, "broadcast")
    return builder.build()


def leaders(world_size: int, options: Options) -> list[int]:
    """Return the ranks that talk to other nodes."""
    return [node[0] for node in split_nodes(world_size, options)]


def split_nodes(world_size: int, options: Options) -> Sequence[Sequence[int]]:
    """Return the ranks of each node: as given, or as many consecutive ones as are to be in a node.

    >>> split_nodes(5, Options(ranks_per_node=2))
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    if options.nodes is None:
        size = options.ranks_per_node
        return [range(first, min(first + size, world_size)) for first in range(0, world_size, size)]
    nodes = options.nodes
    if sorted(rank for node in nodes for rank in node) != list(range(world_size)) or not all(nodes):
        ranks = f"the ranks 0 to {world_size - 1}"
        raise StrategyError(f"hierarchical: nodes {nodes}; wanted each of {ranks} once, and no empty node")
    if options.servers is not None and options.servers > len(nodes):
        found = f"{options.servers} servers between {len(nodes)} nodes {nodes}"
        raise StrategyError(f"hierarchical: {found}; wanted at most one for each node")
    return nodes
