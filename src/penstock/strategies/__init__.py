"""Strategies: one file and one record (`Strategy`) each.

    build_part("all_reduce", "ring", rank=0, world_size=4, numel=1_000_000)           # what one rank does
    build("all_reduce", "ring", world_size=4, numel=1_000_000)                        # what all do, to prove and draw
    build_coded_part("ring", 0, 4, [0, 1_000_000, 1_000_064])                         # the same with a codec

A new strategy is a file with its record, listed in `STRATEGIES`. It is then proved, timed, run and planned.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from penstock.errors import StrategyError, did_you_mean
from penstock.program import Collective, Part, Program
from penstock.program.builder import whole, without_collecting
from penstock.strategies.batches import Batches, make_batches, one_batch
from penstock.strategies.bidirectional_exchange import BIDIRECTIONAL_EXCHANGE
from penstock.strategies.binary_tree import BINARY_TREE
from penstock.strategies.compress import serial, without
from penstock.strategies.double_tree import DOUBLE_TREE
from penstock.strategies.gather import ALL_GATHER
from penstock.strategies.gtopk import GTOPK, GTOPK_DOUBLING
from penstock.strategies.halving_doubling import HALVING_DOUBLING
from penstock.strategies.hierarchical import make_hierarchical
from penstock.strategies.linear_pipeline import LINEAR_PIPELINE
from penstock.strategies.native import NATIVE
from penstock.strategies.parameter_server import PARAMETER_SERVER
from penstock.strategies.recursive_doubling import RECURSIVE_DOUBLING
from penstock.strategies.ring import RING
from penstock.strategies.spanning_tree import SPANNING_TREE
from penstock.strategies.strategy import Builder, Options, Strategy
from penstock.strategies.topk_allgather import TOPK_ALLGATHER

__all__ = [
    "STRATEGIES",
    "Options",
    "Strategy",
    "build",
    "build_compressed",
    "build_part",
    "find_strategy",
    "names",
    "parse_strategy",
]

BLOCK = 1024 * 1024  # elements of a batch where the caller did not choose


def find_strategy(name: str) -> Strategy:
    """Return the record of the strategy called `name`; `-` may stand for `_`."""
    found = STRATEGIES.get(name.replace("-", "_"))
    if found is None:
        raise StrategyError(f"no strategy {name!r}; known: {', '.join(STRATEGIES)}{did_you_mean(name, STRATEGIES)}")
    return found


def names(operation: str | Collective) -> tuple[str, ...]:
    """Return the names of the strategies that carry out `operation` on dense data."""
    collective = _collective(operation)
    return tuple(one.name for one in STRATEGIES.values() if collective in one.builders and not one.sparse)


def sparse_names() -> tuple[str, ...]:
    """Return the names of the strategies whose all-reduce adds blocks of a sparse codec, and carries nothing else."""
    return tuple(one.name for one in STRATEGIES.values() if one.sparse)


def coded_names() -> tuple[str, ...]:
    """Return the names of the strategies in whose all-reduce any codec can encode what travels."""
    return tuple(one.name for one in STRATEGIES.values() if one.coded is not None)


def coded_only_names() -> tuple[str, ...]:
    """Return the names of the strategies that carry what a codec has encoded, and nothing dense."""
    return tuple(one.name for one in STRATEGIES.values() if one.coded is not None and not one.builders)


def meeting_codec(strategy: Strategy, options: Options) -> Strategy:
    """Return the strategy that carries what is encoded: itself, or in two levels the one between nodes."""
    return strategy if strategy.hands_to is None else find_strategy(strategy.hands_to(options))


def build_part(
    operation: str | Collective, name: str, rank: int, world_size: int, numel: int, options: Options | None = None
) -> Part:
    """Return what one rank does in `operation` by the strategy called `name`; `-` may stand for `_`."""
    with without_collecting():
        return _builder(operation, name)(rank, world_size, numel, options or Options())


def build(
    operation: str | Collective, name: str, world_size: int, numel: int, options: Options | None = None
) -> Program:
    """Return the whole program, which is all parts: for proofs, pictures and the simulator."""
    builder, chosen = _builder(operation, name), options or Options()
    return whole(lambda rank: builder(rank, world_size, numel, chosen), world_size)


_batches = lru_cache(maxsize=4)(make_batches)  # all ranks of a program have the same


def build_coded_part(
    name: str, rank: int, world_size: int, bounds: Sequence[int], options: Options | None = None
) -> tuple[Part, Batches]:
    """Return one rank's part of the compressed all-reduce of the tensors between `bounds`, and its batches.

    A position of the part stands for a batch. `options.partitions` is the number of pieces of each tensor (HiPress's
    K), `options.block_numel` about how many elements travel together. Sparse strategies cut nothing: every tensor has
    one block, of its own k largest entries, and all blocks of a bucket travel together.
    """
    options = options or Options()
    strategy = _coded_strategy(name)
    if meeting_codec(strategy, options).sparse:
        batches = one_batch(bounds)
        return coded_part(name, rank, world_size, len(batches.pieces), options), batches
    chunks, waves = strategy.cut(world_size, options)
    block_numel = max(bounds[-1], 1) if options.serial else options.block_numel or BLOCK  # no block waits for another
    batches = _batches(tuple(bounds), chunks, options.partitions, block_numel, waves)
    count = len(batches.pieces)
    options = replace(options, block_numel=1, partitions=max(count, 1))
    with without_collecting():
        part = without(coded_part(name, rank, world_size, count, options, batches.empty), batches.empty)
        return serial(part) if options.serial else part, batches.filled


def build_compressed(
    name: str, world_size: int, bounds: Sequence[int], options: Options | None = None
) -> tuple[Program, Batches]:
    """Return the whole compressed program, and the batches that its positions stand for."""
    _, batches = build_coded_part(name, 0, world_size, bounds, options)
    return whole(lambda rank: build_coded_part(name, rank, world_size, bounds, options)[0], world_size), batches


def coded_part(
    name: str, rank: int, world_size: int, numel: int, options: Options, empty: Collection[int] = ()
) -> Part:
    """Return a rank's part of the compressed all-reduce of `numel` positions, be they elements or batches."""
    strategy = _coded_strategy(name)
    if strategy.coded is None:
        return strategy.builders[Collective.ALL_REDUCE](rank, world_size, numel, options)
    return strategy.coded(rank, world_size, numel, options, empty)


def compressed_program(name: str, world_size: int, numel: int, options: Options) -> Program:
    """Return the whole compressed all-reduce of `numel` positions."""
    return whole(lambda rank: coded_part(name, rank, world_size, numel, options), world_size)


def parse_strategy(text: str) -> tuple[str, dict[str, Any]]:
    """Return a strategy's name and the options written behind it.

    >>> parse_strategy("hierarchical(ranks_per_node=4, outer=gtopk)")
    ('hierarchical', {'ranks_per_node': 4, 'outer': 'gtopk'})
    """
    match = re.fullmatch(r"\s*([^()]+?)\s*(?:\(([^()]*)\))?\s*", text)
    if not match:
        raise StrategyError(f"strategy {text!r}; wanted a name such as ring, or parameter_server(servers=2)")
    strategy = STRATEGIES.get(match[1].replace("-", "_"))
    allowed = strategy.options if strategy else ()
    types = {one.name: one.type for one in fields(Options)}
    options: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in (match[2] or "").split(","))):
        option, _, value = (piece.strip() for piece in part.partition("="))
        if option not in allowed:
            raise StrategyError(f"strategy {text!r}: no option {option!r}; wanted {', '.join(allowed) or 'none'}")
        options[option] = _option(text, option, value, types[option])
    Options(**options)
    return match[1], options


def _option(text: str, option: str, value: str, kind: object) -> Any:
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise StrategyError(f"strategy {text!r}: {option} is {value!r}; wanted true or false")
        return value.lower() == "true"
    if kind is not str and not re.fullmatch("[0-9]{1,18}", value):
        raise StrategyError(f"strategy {text!r}: {option} is {value!r}; wanted a number such as 2")
    return value.replace("-", "_") if kind is str else int(value)


def _collective(operation: str | Collective) -> Collective:
    if isinstance(operation, Collective):
        return operation
    try:
        return Collective(operation.replace("-", "_"))
    except ValueError:
        known = ", ".join(one.value for one in Collective)
        raise StrategyError(f"no operation {operation!r}; known: {known}") from None


def _builder(operation: str | Collective, name: str) -> Builder:
    collective = _collective(operation)
    strategy = STRATEGIES.get(name.replace("-", "_"))
    if strategy is None or collective not in strategy.builders:
        known = [one.name for one in STRATEGIES.values() if collective in one.builders]
        near = did_you_mean(name, known)
        raise StrategyError(f"no strategy {name!r} for {collective.value}; known: {', '.join(known)}{near}")
    return strategy.builders[collective]


def _coded_strategy(name: str) -> Strategy:
    strategy = STRATEGIES.get(name.replace("-", "_"))
    if strategy is None or (strategy.coded is None and not strategy.sparse):
        raise StrategyError(f"no compressed strategy {name!r}; known: {', '.join((*coded_names(), *sparse_names()))}")
    return strategy


STRATEGIES: dict[str, Strategy] = {
    one.name: one
    for one in (
        RING,
        LINEAR_PIPELINE,
        RECURSIVE_DOUBLING,
        HALVING_DOUBLING,
        BINARY_TREE,
        DOUBLE_TREE,
        PARAMETER_SERVER,
        SPANNING_TREE,
        BIDIRECTIONAL_EXCHANGE,
        make_hierarchical(find_strategy),
        NATIVE,
        ALL_GATHER,
        TOPK_ALLGATHER,
        GTOPK,
        GTOPK_DOUBLING,
    )
}
