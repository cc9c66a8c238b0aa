"""Costs as papers publish them, for planners that follow a paper and to compare with; strategies say their own.

HiPress Eq. 1-2 and Table 3: a gradient of m bytes is cut into K partitions. Without a codec, synchronising it takes
`alpha T_send(m/K)`; with one of ratio r, `alpha T_send(r m/K) + beta T_enc(m/K) + gamma T_dec(m/K)`. Here alpha, beta
and gamma are *counts* of serial sends, encodes and decodes (Table 3), not the network's constants. More than N
partitions go in ceil(K/N) batches, each of at most N. The paper writes T_dec of the payload's bytes; our curves are of
the gradient's.

MG-WFBP Table 2: the lines of most strategies are their own; that of double trees is not.

gTop-k Table I: lines in the dense gradient's bytes. Of M bytes of float32, a share `density` of the elements is sent,
each as an index and a value (8 bytes), so k elements are `2 density M` bytes. The paper counts elements; erratum 10.
The programs of `strategies` have other startups, and their merging and selecting take time that the paper leaves out.
"""

from dataclasses import replace

from penstock.curves import CodecCurves, Curve
from penstock.errors import NetworkError
from penstock.network import LinearCost, Network
from penstock.strategies import parameter_server, ring
from penstock.strategies.closed_form import CountFunction, SyncCounts, ceil_log2

__all__ = ["CASYNC", "CodecCurves", "CountFunction", "Curve", "SyncCounts", "sync_seconds"]

BYTES_PER_ENTRY = 8  # int32 index, float32 value
DENSE_BYTES_PER_ELEMENT = 4


def casync_ps_counts(workers: int, partitions: int) -> SyncCounts:
    """CaSync-PS with dedicated aggregators, as Table 3 has it."""
    return SyncCounts(2 * workers, partitions + 1, workers + 1)


CASYNC: dict[str, CountFunction] = {
    "casync_ring": ring.counts,
    "casync_ps": casync_ps_counts,
    "casync_ps_colocated": parameter_server.counts,
}


def sync_seconds(
    counts: CountFunction, workers: int, partitions: int, nbytes: float, send: Curve, codec: CodecCurves | None = None
) -> float:
    """Return the time to synchronise `nbytes` in `partitions` parts among `workers` (Eq. 1 or, with a codec, Eq. 2)."""
    if partitions < 1 or workers < 1:
        raise NetworkError(f"{partitions} partitions among {workers} workers; wanted at least 1 of each")
    if workers == 1:
        return 0.0
    batches = -(-partitions // workers)
    count = counts(workers, min(partitions, workers))
    part = nbytes / partitions
    if codec is None:
        return batches * count.sends * send.seconds(part)
    sending = count.sends * send.seconds(codec.payload_nbytes(part))
    return batches * (sending + count.encodes * codec.encode.seconds(part) + count.decodes * codec.decode.seconds(part))


def double_tree(network: Network, p: int) -> LinearCost:
    """Double binary trees (MG-WFBP Table 2, where `2 log N` lacks its alpha).

    Not attainable: `beta` is what a reduce or a broadcast alone sends. An all-reduce has every byte sent in and out,
    `2 (p-1)/p beta` on each NIC, as in the ring's row.
    """
    alpha, beta, gamma = network.alpha_seconds, network.beta_seconds_per_byte, network.gamma_seconds_per_byte
    return LinearCost(2 * alpha * ceil_log2(p), beta + gamma)


def with_published_double_tree(network: Network, p: int) -> Network:
    """Return a network of `p` workers where double trees cost what MG-WFBP's Table 2 says: for its Fig. 11."""
    return replace(network, workers=p, all_reduce={"double_tree": double_tree(network, p)})


def dense(network: Network, p: int) -> LinearCost:
    """DenseAllReduce (gTop-k Eq. 5): the ring without its summation, which the paper leaves out."""
    alpha, beta = network.alpha_seconds, network.beta_seconds_per_byte
    return LinearCost(2 * (p - 1) * alpha, 2 * (p - 1) / p * beta)


def top_k(network: Network, p: int, density: float) -> LinearCost:
    """TopKAllReduce (gTop-k Eq. 6): an all-gather of k entries of each rank; grows with p."""
    alpha, beta = network.alpha_seconds, network.beta_seconds_per_byte
    return LinearCost(ceil_log2(p) * alpha, (p - 1) * _entry_share(density) * beta)


def gtop_k(network: Network, p: int, density: float) -> LinearCost:
    """Global top-k, gTopKAllReduce (gTop-k Eq. 7): k entries up a tree and down again; grows with log p."""
    alpha, beta = network.alpha_seconds, network.beta_seconds_per_byte
    return LinearCost(2 * ceil_log2(p) * alpha, 2 * ceil_log2(p) * _entry_share(density) * beta)


def _entry_share(density: float) -> float:
    return density * BYTES_PER_ENTRY / DENSE_BYTES_PER_ELEMENT
