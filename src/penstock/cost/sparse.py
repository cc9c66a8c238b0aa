"""Closed forms of sparse all-reduce: gTop-k Table I, and those of our own programs.

Lines in the dense gradient's bytes: of M bytes of float32, a share `density` of the elements is sent, each as an index
and a value (8 bytes), so k elements are `2 density M` bytes. The paper counts elements; erratum 10. World sizes that
are not powers of two take ceil(log2 p) rounds in a tree; an exchange runs on the largest power of two, and ranks beyond
it send their block before and get the result after.

`dense`, `top_k` and `gtop_k` are as published. What stands one after the other in the programs of `strategies` is in
`SPARSE`: the all-gather has p-1 startups, not log p, because a message carries one block; merging and selecting take
the processor's time, which the paper leaves out. The simulator says the same to the last digit, except for trees of
other than a power of two ranks, where some merge is hidden behind a message (tests/cost/test_sparse.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.cost.collectives import ceil_log2, floor_log2
from penstock.cost.compressed import CompressedCost
from penstock.curves import CodecCurves, Curve
from penstock.network import LinearCost, Network

_FREE = Curve(0.0, 0.0)
BYTES_PER_ENTRY = 8  # int32 index, float32 value
DENSE_BYTES_PER_ELEMENT = 4


def dense(network: Network, p: int) -> LinearCost:
    """DenseAllReduce (Eq. 5): the ring without its summation, which the paper leaves out."""
    alpha, beta = network.alpha_seconds, network.beta_seconds_per_byte
    return LinearCost(2 * (p - 1) * alpha, 2 * (p - 1) / p * beta)


def top_k(network: Network, p: int, density: float) -> LinearCost:
    """TopKAllReduce (Eq. 6): an all-gather of everybody's k entries; grows with p."""
    alpha, beta = network.alpha_seconds, network.beta_seconds_per_byte
    return LinearCost(ceil_log2(p) * alpha, (p - 1) * _entry_share(density) * beta)


def gtop_k(network: Network, p: int, density: float) -> LinearCost:
    """Global top-k, gTopKAllReduce (Eq. 7): k entries up a tree and down again; grows with log p."""
    alpha, beta = network.alpha_seconds, network.beta_seconds_per_byte
    return LinearCost(2 * ceil_log2(p) * alpha, 2 * ceil_log2(p) * _entry_share(density) * beta)


def _entry_share(density: float) -> float:
    return density * BYTES_PER_ENTRY / DENSE_BYTES_PER_ELEMENT


@dataclass(frozen=True, slots=True)
class Round:
    """One step of a sparse all-reduce: how many messages travel at once, and how many ranks merge afterwards."""

    messages: int
    merges: int = 0
    children: int = 0  # of a broadcast: how many the sender with most to do still sends to, this one included


@dataclass(frozen=True, slots=True)
class SparseSteps:
    """What stands one after the other in a sparse all-reduce."""

    messages: int
    merges: int = 0
    adds: int = 0  # of blocks to the gradient
    rounds: tuple[Round, ...] = ()  # the same, with what happens at once; none where ranks do not wait for one another


def top_k_steps(p: int) -> SparseSteps:
    """Top-k by all-gather: p-1 messages on every NIC, then p-1 blocks are added to the first."""
    return SparseSteps(p - 1, adds=p - 1)


def gtop_k_steps(p: int) -> SparseSteps:
    """Tree and broadcast: ceil(log2 p) messages up, each merged, and as many down."""
    distances = [1 << shift for shift in range(ceil_log2(p))]
    pairs = [len(range(0, p - distance, 2 * distance)) for distance in distances]
    up = (Round(count, count) for count in pairs)
    down = (Round(count, children=level) for level, count in reversed([*enumerate(pairs, 1)]))
    rounds = (*up, *down)
    return SparseSteps(2 * ceil_log2(p), ceil_log2(p), rounds=rounds)


def gtop_k_doubling_steps(p: int) -> SparseSteps:
    """Exchange at doubling distances; folding costs a message and a merge before, and a message after."""
    rounds, power = floor_log2(p), 1 << floor_log2(p)
    before, after = ((Round(p - power, p - power),), (Round(p - power),)) if p != power else ((), ())
    steps = (*before, *(Round(power, power) for _ in range(rounds)), *after)
    return SparseSteps(len(steps), rounds + len(before), rounds=steps)


SPARSE: dict[str, Callable[[int], SparseSteps]] = {
    "topk_allgather": top_k_steps,
    "gtopk": gtop_k_steps,
    "gtopk_doubling": gtop_k_doubling_steps,
}


def block_curves(share: float) -> CodecCurves:
    """Return the curves of blocks that cost nothing but their bytes, as the paper counts; `share` of the dense ones."""
    return CodecCurves(share, _FREE, _FREE, block_merge=_FREE)


def exchange_cost(strategy: str, network: Network, p: int, codec: CodecCurves) -> LinearCost:
    """Return the time from the first block sent to the result in the gradient, selection not included."""
    calls = _calls(strategy, network, p, codec)
    startup = sum(count * line.a_seconds for count, line in calls)
    return LinearCost(startup, sum(count * line.b_seconds_per_byte for count, line in calls))


def selection_cost(codec: CodecCurves) -> LinearCost:
    """Return the time to accumulate and select."""
    return _line(codec.encode)


def sparse_cost(strategy: str, network: Network, codec: CodecCurves, p: int) -> CompressedCost:
    """Return the cost of a bucket for planners: selection and exchange, a block for each tensor in one message."""
    whole = selection_cost(codec) + exchange_cost(strategy, network, p, codec)
    alphas = SPARSE[strategy](p).messages * network.alpha_seconds
    return CompressedCost(LinearCost(alphas, whole.b_seconds_per_byte), whole.a_seconds - alphas)


def fastest_variant(network: Network, p: int, codec: CodecCurves, nbytes: float) -> str:
    """Return the sparse all-reduce that takes least for a gradient of `nbytes`; of equal ones the first of `SPARSE`."""
    return min(SPARSE, key=lambda strategy: exchange_cost(strategy, network, p, codec).seconds(nbytes))


def first_world_size(network: Network, codec: CodecCurves, nbytes: float, strategy: str = "gtopk") -> int | None:
    """Return from how many workers on `strategy` is faster than top-k by all-gather; None where never up to 1024."""
    slower = [p for p in range(2, 1025) if not _beats_top_k(strategy, network, p, codec, nbytes)]
    first = max(slower, default=1) + 1
    return first if first <= 1024 else None


def _beats_top_k(strategy: str, network: Network, p: int, codec: CodecCurves, nbytes: float) -> bool:
    ours, theirs = (exchange_cost(name, network, p, codec).seconds(nbytes) for name in (strategy, "topk_allgather"))
    return ours < theirs


def _calls(strategy: str, network: Network, p: int, codec: CodecCurves) -> list[tuple[int, LinearCost]]:
    """Return what stands one after the other, and how often."""
    assert codec.block_merge is not None, "a codec whose blocks can be merged"
    steps, beta = SPARSE[strategy](p), network.beta_seconds_per_byte
    message = LinearCost(network.alpha_seconds + beta * codec.fixed_nbytes, beta * codec.ratio)
    return [
        (steps.messages, message),
        (steps.merges, _line(codec.block_merge)),
        (1, _line(codec.decode)),
        (steps.adds, _line(codec.merge)),
    ]


def _line(curve: Curve) -> LinearCost:
    return LinearCost(curve.least_seconds, curve.seconds_per_byte)
