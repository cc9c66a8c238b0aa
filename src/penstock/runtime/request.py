"""What a call asks for: all that determines its program, and how large its blocks are where the caller did not say.

Ranks compare requests, not programs: a request is short, and the same on all ranks, while each of them builds only its
own part.

Block sizes: between hosts, blocks keep all links busy at once; the strategies' own sizes do that, or those the cost
model finds best on a measured network. Where all ranks share one host with few cores, the processor is the link: a
message keeps the core of its sender and that of its receiver busy, so only `cores / 2` messages move at once whatever
the program says, and cutting finer only adds what a message costs. With gloo over loopback that is much: 0.3 ms of
processor time each, as its thread polls the socket while the caller's thread writes to it (4 ranks, 2 cores, 16 MB
pipelined: 75 ms of processor time in blocks of 256 KB, 23 ms in blocks of 4 MB).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import penstock
from penstock.codecs.codec import Codec
from penstock.codecs.low_rank import LowRank
from penstock.codecs.registry import make_codec
from penstock.network import Network
from penstock.plan import Plan
from penstock.program import Collective, Part, Program
from penstock.program.composition import LANES, Composition, compose
from penstock.runtime.views import Flat, storage_dtype
from penstock.strategies import build, build_coded_part, build_compressed, build_part, parse_strategy
from penstock.strategies.batches import Batches
from penstock.strategies.linear_pipeline import NAME as LINEAR_PIPELINE
from penstock.strategies.linear_pipeline import best_block_nbytes
from penstock.strategies.strategy import SMALLEST_BLOCK, Options, coded_block

CROWDED_NBYTES = 4 << 20  # of a block where ranks outnumber half the cores of their one host


@dataclass(frozen=True, slots=True)
class Request:
    """A collective by a strategy on so many elements: what ranks compare, and what programs are made from."""

    collective: Collective
    strategy: str
    world_size: int
    numel: int
    dtype: str
    options: Options
    bounds: tuple[int, ...] | None = None  # of the tensors, where a codec encodes each by itself; None: dense

    def part(self, rank: int) -> tuple[Part, Batches | None]:
        """Return what a rank does, and what its positions stand for where those are not elements."""
        if self.bounds is not None:
            return build_coded_part(self.strategy, rank, self.world_size, self.bounds, self.options)
        return build_part(self.collective, self.strategy, rank, self.world_size, self.numel, self.options), None

    def program(self) -> tuple[Program, Batches | None]:
        """Return what all ranks do, for engines whose messages start together on all of them, and the batches."""
        if self.bounds is not None:
            return build_compressed(self.strategy, self.world_size, self.bounds, self.options)
        return build(self.collective, self.strategy, self.world_size, self.numel, self.options), None

    def digest(self, codec: Codec | None) -> str:
        """Return a fingerprint of all that ranks must agree on; the version stands for how strategies build."""
        named = f"{codec.name} {codec.fingerprint}" if codec else None
        return hashlib.sha256(f"penstock {penstock.__version__}: {self} {named}".encode()).hexdigest()


def compressed_request(
    strategy: str,
    codec: Codec,
    world_size: int,
    bounds: tuple[int, ...],
    options: dict[str, Any],
    dtype: str = "float32",
    queued: bool = False,
) -> Request:
    """Return the request for an all-reduce of the tensors between `bounds`, through a codec.

    Blocks have the size that is best for what the codec makes of them. Where messages are queued on a device, a round's
    are one group, and nothing is cut.
    """
    block = max(bounds[-1], 1) if queued else coded_block(codec.max_nbytes(1 << 20))
    chosen = Options(**{"block_numel": block, **options})
    return Request(Collective.ALL_REDUCE, strategy, world_size, bounds[-1], dtype, chosen, bounds)


def plan_composition(plan: Plan, numel: Mapping[str, int], queued: bool = False) -> Composition:
    """Return the iteration that a plan is, for `verify`: the programs of its messages, dealt out to lanes.

    `numel`: elements of each tensor. Dense messages have the strategies' own blocks. `queued`: as on a device, where a
    compressed message is not cut into blocks, and all of them are in one lane.
    """
    programs = []
    for bucket in plan.messages:
        bounds = tuple(accumulate((numel[name] for name in bucket.tensors), initial=0))
        name, options = parse_strategy(bucket.strategy)
        codec = None if bucket.codec is None else make_codec(bucket.codec)
        if codec is None or isinstance(codec, LowRank):  # factors are summed dense
            chosen = Options(**options)
            request = Request(Collective.ALL_REDUCE, name, plan.workers, bounds[-1], "float32", chosen)
        else:
            options = {**options, **bucket.route.options}
            request = compressed_request(name, codec, plan.workers, bounds, options, queued=queued)
        programs.append(request.program()[0])
    return compose(programs, 1 if queued else LANES)


@dataclass(frozen=True, slots=True)
class OwnProgram:
    """A request for a program that the caller has made."""

    whole: Program
    dtype: str

    def part(self, rank: int) -> tuple[Program, None]:
        """Return all of it: the executor finds out how many messages must be in flight."""
        return self.whole, None

    def program(self) -> tuple[Program, None]:
        """Return the caller's program; its positions are elements."""
        return self.whole, None

    def digest(self, codec: Codec | None) -> str:
        """Return nothing: the executor takes a fingerprint of all instructions."""
        return ""


def is_crowded(shared_cores: int, world_size: int) -> bool:
    """Say whether all ranks are on one host that has fewer than two cores for each; `shared_cores` is 0 otherwise."""
    return 0 < shared_cores < 2 * world_size


def with_block(
    options: dict[str, Any],
    collective: Collective,
    strategy: str,
    target: Flat,
    world_size: int,
    network: Network | None,
    shared_cores: int,
) -> dict[str, Any]:
    """Return the options with a block size where the strategy's own is not the best; a given one is kept.

    `shared_cores` is how many cores the ranks share if all of them are on one host, else 0.
    """
    if "block_numel" in options:
        return options
    itemsize = storage_dtype(target.dtype).itemsize
    if is_crowded(shared_cores, world_size):
        return {**options, "block_numel": CROWDED_NBYTES // itemsize}
    if network is None or not network.alpha_seconds or strategy.replace("-", "_") != LINEAR_PIPELINE:
        return options  # a startup too short to be measured says nothing about blocks
    nbytes = best_block_nbytes(network, world_size, target.nbytes, collective)
    return {**options, "block_numel": max(SMALLEST_BLOCK, round(nbytes / itemsize))}
