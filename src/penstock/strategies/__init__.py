"""Strategies: pure functions from a world size and a number of elements to a `Program`.

`build("all_reduce", "ring", 4, 1_000_000)` makes the program for one call; what it is made of, how it is proved and
how it is drawn are the same for all of them.
"""

from collections.abc import Callable, Mapping
from functools import partial

from penstock.errors import StrategyError
from penstock.program import Collective, Program
from penstock.strategies import (
    bidirectional_exchange,
    binary_tree,
    double_tree,
    gtopk,
    halving_doubling,
    hierarchical,
    linear_pipeline,
    native,
    parameter_server,
    recursive_doubling,
    ring,
    spanning_tree,
    topk_allgather,
)
from penstock.strategies.options import Options

__all__ = ["SPARSE", "STRATEGIES", "Options", "Strategy", "build", "names"]

Strategy = Callable[[int, int, Options], Program]  # (world_size, numel, options)


def build(
    operation: str | Collective, name: str, world_size: int, numel: int, options: Options | None = None
) -> Program:
    """Return the program that carries out `operation` by the strategy called `name`; `-` may stand for `_`."""
    chosen = operation.value if isinstance(operation, Collective) else operation.replace("-", "_")
    if chosen not in {known for known, _ in STRATEGIES}:
        raise StrategyError(f"no operation {operation!r}; known: {', '.join(one.value for one in Collective)}")
    key = (chosen, name.replace("-", "_"))
    strategy = STRATEGIES.get(key) or SPARSE.get(key)
    if strategy is None:
        known = (*names(chosen), *(known for operation, known in SPARSE if operation == chosen))
        raise StrategyError(f"no strategy {name!r} for {chosen}; known: {', '.join(known)}")
    return strategy(world_size, numel, options or Options())


def names(operation: str | Collective) -> tuple[str, ...]:
    """Return the names of the strategies for `operation` that need no codec."""
    chosen = operation.value if isinstance(operation, Collective) else operation.replace("-", "_")
    return tuple(name for known, name in STRATEGIES if known == chosen)


STRATEGIES: Mapping[tuple[str, str], Strategy] = {
    ("all_reduce", "ring"): ring.all_reduce,
    ("all_reduce", "linear_pipeline"): linear_pipeline.all_reduce,
    ("all_reduce", "recursive_doubling"): recursive_doubling.all_reduce,
    ("all_reduce", "halving_doubling"): halving_doubling.all_reduce,
    ("all_reduce", "binary_tree"): binary_tree.all_reduce,
    ("all_reduce", "double_tree"): double_tree.all_reduce,
    ("all_reduce", "parameter_server"): parameter_server.all_reduce,
    ("all_reduce", "spanning_tree"): spanning_tree.all_reduce,
    ("all_reduce", "bidirectional_exchange"): bidirectional_exchange.all_reduce,
    ("all_reduce", "hierarchical"): partial(hierarchical.all_reduce, build=build),
    ("all_reduce", "native"): native.all_reduce,
    ("broadcast", "linear_pipeline"): linear_pipeline.broadcast,
    ("broadcast", "spanning_tree"): spanning_tree.broadcast,
    ("broadcast", "bidirectional_exchange"): bidirectional_exchange.broadcast,
    ("broadcast", "native"): native.broadcast,
    ("reduce", "linear_pipeline"): linear_pipeline.reduce,
    ("reduce", "spanning_tree"): spanning_tree.reduce,
    ("reduce", "bidirectional_exchange"): bidirectional_exchange.reduce,
    ("reduce", "native"): native.reduce,
    ("reduce_scatter", "ring"): ring.reduce_scatter,
    ("reduce_scatter", "bidirectional_exchange"): bidirectional_exchange.reduce_scatter,
    ("reduce_scatter", "native"): native.reduce_scatter,
    ("all_gather", "ring"): ring.all_gather,
    ("all_gather", "bidirectional_exchange"): bidirectional_exchange.all_gather,
    ("all_gather", "native"): native.all_gather,
}
SPARSE: Mapping[tuple[str, str], Strategy] = {  # of a sparse codec's blocks
    ("all_reduce", "topk_allgather"): topk_allgather.all_reduce,
    ("all_reduce", "gtopk"): gtopk.all_reduce,
    ("all_reduce", "gtopk_doubling"): gtopk.all_reduce_doubling,
}
