"""What a caller may choose about a strategy beyond the world size and the number of elements."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import StrategyError

LARGEST_BLOCK = 64 * 1024  # elements; more fills the pipe slowly
CHUNK_BLOCK = 128 * 1024  # elements; a ring has no pipe to fill, and larger blocks need fewer turns of a busy processor
SMALLEST_BLOCK = 4 * 1024  # elements; less costs more in startups than overlap saves


NAMED: Mapping[str, tuple[str, ...]] = {  # what may be written behind a strategy's name; nothing for any other
    "parameter_server": ("servers",),
    "hierarchical": ("ranks_per_node", "inner", "outer", "servers"),
}
_TEXTS = ("inner", "outer")  # all others are numbers


def parse_strategy(text: str) -> tuple[str, dict[str, Any]]:
    """Return a strategy's name and the options written behind it.

    >>> parse_strategy("hierarchical(ranks_per_node=4, outer=gtopk)")
    ('hierarchical', {'ranks_per_node': 4, 'outer': 'gtopk'})
    """
    match = re.fullmatch(r"\s*([^()]+?)\s*(?:\(([^()]*)\))?\s*", text)
    if not match:
        raise StrategyError(f"strategy {text!r}; wanted a name such as ring, or parameter_server(servers=2)")
    options: dict[str, Any] = {}
    allowed = NAMED.get(match[1].replace("-", "_"), ())
    for part in filter(None, (piece.strip() for piece in (match[2] or "").split(","))):
        option, _, value = (piece.strip() for piece in part.partition("="))
        if option not in allowed:
            raise StrategyError(f"strategy {text!r}: no option {option!r}; wanted {', '.join(allowed) or 'none'}")
        if option not in _TEXTS and not value.isdecimal():
            raise StrategyError(f"strategy {text!r}: {option} is {value!r}; wanted a number such as 2")
        options[option] = value.replace("-", "_") if option in _TEXTS else int(value)
    Options(**options)
    return match[1], options


@dataclass(frozen=True, slots=True)
class Options:
    """Choices of a strategy; each ignores what does not concern it."""

    block_numel: int | None = None  # elements of a pipelined block; the cost model's best, or None for a fixed default
    root: int = 0  # of a broadcast or reduce
    partitions: int | None = None  # parameter server: pieces of the tensor; None for one per aggregator
    servers: int | None = None  # parameter server: this many ranks at the end aggregate; None for every rank
    ranks_per_node: int = 2  # hierarchical: so many consecutive ranks are a node
    inner: str = "spanning_tree"  # hierarchical: reduce and broadcast inside a node
    outer: str = "ring"  # hierarchical: all-reduce between the first ranks of the nodes
    nodes: tuple[tuple[int, ...], ...] | None = None  # hierarchical: the ranks of each node, instead of ranks_per_node

    def __post_init__(self) -> None:
        for name in ("block_numel", "partitions", "servers", "ranks_per_node"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise StrategyError(f"{name} is {value}; wanted >= 1")

    def chunk_block(self) -> int:
        """Return the block size where a piece may well travel as one block."""
        return self.block_numel or CHUNK_BLOCK

    def pipe_block(self, numel: int) -> int:
        """Return the block size for a pipe of `numel` elements: at least four blocks where that is worth it.

        For 64Ki elements that is 16Ki, the 64 KB of float32 that Wang et al. use.
        """
        return self.block_numel or min(max(-(-numel // 4), SMALLEST_BLOCK), LARGEST_BLOCK)
