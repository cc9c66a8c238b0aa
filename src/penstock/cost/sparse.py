"""Closed forms of sparse all-reduce: gTop-k Table I.

Lines in the dense gradient's bytes: of M bytes of float32, a share `density` of the elements is sent, each as an index
and a value (8 bytes), so k elements are `2 density M` bytes. The paper counts elements; erratum 10. World sizes that
are not powers of two take ceil(log2 p) rounds.
"""

from penstock.cost.collectives import ceil_log2
from penstock.network import LinearCost, Network

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
