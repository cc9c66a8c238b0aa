"""`Strategy`: one record per strategy, in the strategy's own file, with all that others need to know about it.

    RING = Strategy("ring", {Collective.ALL_REDUCE: all_reduce, ...}, coded=compressed(all_reduce), ...)

`penstock.strategies` lists the records. A builder makes one rank's part of a program, at the cost of that part alone.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.curves import CodecCurves
from penstock.errors import StrategyError
from penstock.network import LinearCost, Network
from penstock.program import Collective, Part
from penstock.strategies.closed_form import (
    CompressedCost,
    CountFunction,
    SparseSteps,
    counted_cost,
    sparse_cost,
)

LARGEST_BLOCK = 64 * 1024  # elements; more fills the pipe slowly
CHUNK_BLOCK = 128 * 1024  # elements; a ring has no pipe to fill, and larger blocks need fewer turns of a busy processor
SMALLEST_BLOCK = 4 * 1024  # elements; less costs more in startups than overlap saves
CODED_NBYTES = 256 << 10  # of a compressed message; with 64 KB a ring of 15M elements used 1.6x the processor time


def coded_block(nbytes_of_a_million: float) -> int:
    """Return how many elements a codec makes about `CODED_NBYTES` of, judged by what it makes of 2^20 elements."""
    return max(SMALLEST_BLOCK, (CODED_NBYTES << 20) // max(round(nbytes_of_a_million), 1))


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller may choose beyond world size and number of elements; strategies ignore what is not for them.

    Those that a strategy lists in its record may be written behind its name: `parameter_server(servers=2)`.
    """

    block_numel: int | None = None  # elements of a pipelined block; the cost model's best, or None for a fixed default
    root: int = 0  # of a broadcast or reduce
    partitions: int | None = None  # parameter server: pieces of the tensor; None for one per aggregator
    servers: int | None = None  # parameter server: this many ranks at the end aggregate; None for every rank
    dedicated: bool = False  # parameter server: these ranks only aggregate, and their own data counts as zeros
    ranks_per_node: int = 2  # hierarchical: so many consecutive ranks are a node
    inner: str = "spanning_tree"  # hierarchical: reduce and broadcast inside a node
    outer: str = "ring"  # hierarchical: all-reduce between the first ranks of the nodes
    nodes: tuple[tuple[int, ...], ...] | None = None  # hierarchical: the ranks of each node, instead of ranks_per_node
    serial: bool = False  # ring with a codec: a rank computes nothing while it sends, to see what overlap gains

    def __post_init__(self) -> None:
        for name in ("block_numel", "partitions", "servers", "ranks_per_node"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise StrategyError(f"{name} is {value}; wanted >= 1")
        if self.dedicated and self.servers is None:
            raise StrategyError(
                "dedicated without servers; wanted how many: parameter_server(servers=2, dedicated=true)"
            )

    def chunk_block(self) -> int:
        """Return the block size where a piece may well travel as one block."""
        return self.block_numel or CHUNK_BLOCK

    def pipe_block(self, numel: int) -> int:
        """Return the block size for a pipe of `numel` elements: at least four blocks where that is worth it.

        For 64Ki elements that is 16Ki, the 64 KB of float32 that Wang et al. use.
        """
        return self.block_numel or min(max(-(-numel // 4), SMALLEST_BLOCK), LARGEST_BLOCK)


DEFAULT = Options()


class Cut(NamedTuple):
    """How a strategy cuts data before a codec sees it (`batches`)."""

    chunks: int  # equal parts
    waves: bool = False  # first one batch of each chunk, then another of each; otherwise chunk by chunk


def uncut(world_size: int, options: Options) -> Cut:
    """Return how strategies cut that send everything over one path."""
    return Cut(1)


def one_chunk_per_rank(world_size: int, options: Options) -> Cut:
    """Return how strategies cut in which each rank sums a part."""
    return Cut(world_size)


Builder = Callable[[int, int, int, Options], Part]  # (rank, world_size, numel, options)
CodedBuilder = Callable[[int, int, int, Options, Collection[int]], Part]  # and positions that have nothing to send
CostFunction = Callable[[Network, int, Options], LinearCost | None]  # (network, world_size, options); None: unknown
CodedCostFunction = Callable[[Network, CodecCurves, int, int, Options], CompressedCost | None]  # (.., partitions, ..)


@dataclass(frozen=True, slots=True)
class Strategy:
    """One strategy: how it builds each rank's part, what it carries, how it cuts, and what it costs where known.

    Without a closed form a strategy is planned by lines fitted to its simulated program (`simulator.fitted`).
    """

    name: str
    builders: Mapping[Collective, Builder] = field(default_factory=dict)
    coded: CodedBuilder | None = None  # the all-reduce in which a codec encodes what travels; None: there is none
    sparse: bool = False  # its all-reduce adds blocks of a sparse codec, and carries nothing else
    options: tuple[str, ...] = ()  # fields of `Options` that may be written behind its name
    cut: Callable[[int, Options], Cut] = uncut
    hands_to: Callable[[Options], str] | None = None  # the strategy that meets the codec, where it joins several
    costs: Mapping[Collective, CostFunction] = field(default_factory=dict)  # closed forms
    stages: Callable[[Network, int, Options], Mapping[str, LinearCost]] | None = None  # where messages overlap others'
    counts: CountFunction | None = None  # closed form with a codec: what of a piece stands one after the other
    steps: Callable[[int], SparseSteps] | None = None  # closed form of a sparse one
    coded_form: CodedCostFunction | None = None  # closed form with a codec that no counts give

    @property
    def dense(self) -> bool:
        """Whether it carries an all-reduce of values as they are."""
        return Collective.ALL_REDUCE in self.builders and not self.sparse

    def cost(self, network: Network, workers: int, options: Options) -> LinearCost | None:
        """Return the closed form of the dense all-reduce; None where there is none."""
        form = self.costs.get(Collective.ALL_REDUCE)
        return None if form is None else form(network, workers, options)

    def has_coded_form(self) -> bool:
        """Say whether there is a closed form with a codec."""
        return any(form is not None for form in (self.counts, self.steps, self.coded_form))

    def coded_cost(
        self, network: Network, codec: CodecCurves, workers: int, partitions: int, options: Options
    ) -> CompressedCost | None:
        """Return the closed form of a bucket's all-reduce with a codec; None where there is none.

        `partitions` are the pieces of each tensor; 1 leaves them to the strategy.
        """
        if self.coded_form is not None:
            return self.coded_form(network, codec, workers, partitions, options)
        if self.steps is not None:
            return sparse_cost(self.steps(workers), network, codec)
        if self.counts is None:
            return None
        chunks = self.cut(workers, options).chunks
        pieces = chunks if partitions == 1 else partitions
        return counted_cost(network, codec, self.counts(workers, min(pieces, workers)), pieces, -(-pieces // chunks))
