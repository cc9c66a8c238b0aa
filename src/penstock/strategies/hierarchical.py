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

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from penstock.curves import CodecCurves
from penstock.errors import StrategyError
from penstock.network import LinearCost, Network
from penstock.program import Collective, Part
from penstock.program.builder import PartBuilder
from penstock.strategies.closed_form import CompressedCost
from penstock.strategies.strategy import Builder, Cut, Options, Strategy

NAME = "hierarchical"
Find = Callable[[str], Strategy]


def make_hierarchical(find: Find) -> Strategy:
    """Return the record; `find` looks up the strategies inside and between the nodes."""
    levels = _Levels(find)
    return Strategy(
        NAME,
        {Collective.ALL_REDUCE: levels.all_reduce},
        coded=levels.coded,
        options=("ranks_per_node", "inner", "outer", "servers"),
        cut=levels.cut,
        hands_to=lambda options: options.outer,
        costs={Collective.ALL_REDUCE: levels.cost},
        coded_form=levels.coded_cost,
    )


class _Levels:
    """Joins the parts, and adds up the costs, of the strategies inside and between nodes."""

    def __init__(self, find: Find) -> None:
        self.find = find

    def all_reduce(self, rank: int, world_size: int, numel: int, options: Options) -> Part:
        """Reduce inside each node, all-reduce between the first ranks, broadcast inside each node."""
        between = self._builder(options.outer, Collective.ALL_REDUCE)
        return self._join(rank, world_size, numel, options, between)

    def coded(self, rank: int, world_size: int, numel: int, options: Options, empty: Collection[int]) -> Part:
        """Local aggregation (HiPress, section 5): dense inside nodes, compressed between their first ranks."""
        if options.inner != "spanning_tree":
            raise StrategyError(f"hierarchical with a codec: inner strategy {options.inner!r}; wanted spanning_tree")
        outer = self.find(options.outer)
        if outer.sparse:
            return self.all_reduce(rank, world_size, numel, options)
        if outer.coded is None:
            raise StrategyError(f"hierarchical: {options.outer} carries nothing encoded; choose another outer strategy")
        coded = outer.coded

        def between(leader: int, count: int, positions: int, part: Options) -> Part:
            return coded(leader, count, positions, part, empty)

        return self._join(rank, world_size, numel, options, between)

    def _join(self, rank: int, world_size: int, numel: int, options: Options, between: Builder) -> Part:
        builder = PartBuilder(NAME, Collective.ALL_REDUCE, rank, world_size, numel)
        nodes, inside = split_nodes(world_size, options), replace(options, root=0)
        place, node = next((place, node) for place, node in enumerate(nodes) if rank in node)
        here = node.index(rank)
        reduce, broadcast = (self._builder(options.inner, one) for one in (Collective.REDUCE, Collective.BROADCAST))
        builder.include(reduce(here, len(node), numel, inside), node, "reduce")
        if here == 0:
            builder.include(between(place, len(nodes), numel, inside), [node[0] for node in nodes], "between")
        # in turn: the ranks of other nodes wait longer than those of this one
        builder.include(broadcast(here, len(node), numel, inside), node, "broadcast", in_turn=True)
        return builder.build()

    def _builder(self, name: str, collective: Collective) -> Builder:
        strategy = self.find(name)
        if name in ("native", NAME):
            raise StrategyError(f"hierarchical: {name} cannot be a part of it; choose another inner or outer strategy")
        if collective not in strategy.builders:
            raise StrategyError(f"hierarchical: {name} has no {collective.value}; choose another inner strategy")
        return strategy.builders[collective]

    def cut(self, world_size: int, options: Options) -> Cut:
        """Cut as the strategy between nodes does."""
        return self.find(options.outer).cut(len(leaders(world_size, options)), options)

    def cost(self, network: Network, p: int, options: Options) -> LinearCost | None:
        """Return the sum of the parts: the largest node inside, and what is between."""
        nodes = split_nodes(p, options)
        between = self.find(options.outer).cost(network, len(nodes), options)
        inside = self._inside(network, nodes, options)
        return None if between is None or inside is None else inside + between

    def coded_cost(
        self, network: Network, codec: CodecCurves, p: int, partitions: int, options: Options
    ) -> CompressedCost | None:
        """Return the sum of the parts, compressed between the nodes."""
        nodes = split_nodes(p, options)
        between = self.find(options.outer).coded_cost(network, codec, len(nodes), partitions, options)
        inside = self._inside(network, nodes, options)
        if between is None or inside is None:
            return None
        return CompressedCost(inside + between.line, between.seconds_per_tensor)

    def _inside(self, network: Network, nodes: Sequence[Sequence[int]], options: Options) -> LinearCost | None:
        forms, size = self.find(options.inner).costs, max(map(len, nodes))
        if Collective.REDUCE not in forms or Collective.BROADCAST not in forms:
            return None
        up, down = (forms[one](network, size, options) for one in (Collective.REDUCE, Collective.BROADCAST))
        return None if up is None or down is None else up + down


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
