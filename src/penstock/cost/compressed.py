"""Compressed collectives as lines: what Eq. 2 of HiPress says of our programs, in a form that planners can add up.

A bucket of n tensors and m dense bytes costs `a + b m + c n`: every tensor is cut into pieces and compressed by itself
(partition, then compress, then batch), so each brings its own calls of the codec and its own headers, besides its
bytes. A bucket of one tensor costs exactly what Eq. 2 says, where no curve lies on its floor; where one does, and for
tensors too small to be cut, the line is above it.

    ring                K pieces, in ceil(K/N) batches; N encodes and N decodes of a piece are not hidden
    parameter server    K pieces; every rank encodes all of them, an aggregator decodes N of each of its own
    binary tree         K pieces; every level sends and decodes, and encodes anew on the way up
    all-gather          K pieces; every rank encodes its own once, sends them to all others and decodes everybody's

K is the plan's `partitions`. Where that is 1 the strategy cuts as it likes: a ring and parameter servers into one piece
per rank, the others not at all.
"""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.cost.codecs import SyncCounts, casync_ps_colocated_counts, casync_ring_counts
from penstock.cost.collectives import ceil_log2
from penstock.curves import CodecCurves
from penstock.network import LinearCost, Network


@dataclass(frozen=True, slots=True)
class CompressedCost:
    """The cost of a bucket, `line.seconds(nbytes) + seconds_per_tensor * tensors`."""

    line: LinearCost
    seconds_per_tensor: float


def compressed_ring(network: Network, codec: CodecCurves, workers: int, partitions: int) -> CompressedCost:
    """Return the cost of a ring; with fewer pieces than ranks, some links idle."""
    pieces = workers if partitions == 1 else partitions
    return _cost(network, codec, casync_ring_counts(workers, pieces), pieces, -(-pieces // workers))


def compressed_parameter_server(network: Network, codec: CodecCurves, workers: int, partitions: int) -> CompressedCost:
    """Return the cost with aggregators on all ranks."""
    pieces = workers if partitions == 1 else partitions
    counts = casync_ps_colocated_counts(workers, min(pieces, workers))
    return _cost(network, codec, counts, pieces, -(-pieces // workers))


def compressed_binary_tree(network: Network, codec: CodecCurves, workers: int, partitions: int) -> CompressedCost:
    """Return the cost of a reduce to one rank and a broadcast from it, each level with whole pieces."""
    levels = ceil_log2(workers)
    return _cost(network, codec, SyncCounts(2 * levels, levels + 1, levels + 1), partitions, partitions)


def compressed_all_gather(network: Network, codec: CodecCurves, workers: int, partitions: int) -> CompressedCost:
    """Return the cost of sending every rank's payload to every other: few steps, many bytes."""
    return _cost(network, codec, SyncCounts(workers - 1, 1, workers), partitions, partitions)


CompressedFunction = Callable[[Network, CodecCurves, int, int], CompressedCost]
COMPRESSED: dict[str, CompressedFunction] = {
    "ring": compressed_ring,
    "parameter_server": compressed_parameter_server,
    "binary_tree": compressed_binary_tree,
    "all_gather": compressed_all_gather,
}


def _cost(network: Network, codec: CodecCurves, count: SyncCounts, pieces: int, batches: int) -> CompressedCost:
    """Add up `batches` times Eq. 2 for one of `pieces` parts: sends are shared by all tensors, calls by none."""
    beta = network.beta_seconds_per_byte
    calls = count.encodes * codec.encode.least_seconds + count.decodes * codec.decode.least_seconds
    calls += count.sends * beta * codec.fixed_nbytes
    per_byte = (
        count.sends * beta * codec.ratio
        + count.encodes * codec.encode.seconds_per_byte
        + count.decodes * codec.decode.seconds_per_byte
    )
    line = LinearCost(batches * count.sends * network.alpha_seconds, batches / pieces * per_byte)
    return CompressedCost(line, batches * calls)
