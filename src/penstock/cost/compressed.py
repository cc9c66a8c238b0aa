"""Compressed collectives as lines: what Eq. 2 of HiPress says of our programs, in a form that planners can add up.

A bucket of n tensors and m dense bytes costs `a + b m + c n`: every tensor is compressed by itself (partition, then
compress, then batch), so each brings its own calls of the codec and its own header, besides its bytes. A bucket of one
tensor costs exactly what Eq. 2 says, where no curve lies on its floor; where one does, the line is above it.

    ring of N ranks, K partitions      K N pieces, in K batches; N encodes and N decodes of a piece are not hidden
    parameter server, K partitions     K pieces; every rank encodes all of them, its aggregator decodes N of each
    recursive doubling                 one piece; a round sends, decodes and adds, and encodes anew
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
    """Return the cost of a ring; it always cuts each of its partitions into one piece per rank."""
    return _cost(network, codec, casync_ring_counts(workers, workers), partitions * workers, partitions)


def compressed_parameter_server(network: Network, codec: CodecCurves, workers: int, partitions: int) -> CompressedCost:
    """Return the cost with aggregators on all ranks, `partitions` pieces."""
    batches = -(-partitions // workers)
    return _cost(network, codec, casync_ps_colocated_counts(workers, min(partitions, workers)), partitions, batches)


def compressed_recursive_doubling(
    network: Network, codec: CodecCurves, workers: int, partitions: int
) -> CompressedCost:
    """Return the cost of exchanging and adding whole payloads; ranks beyond a power of two cost two more rounds."""
    rounds = ceil_log2(workers) + (0 if workers & (workers - 1) == 0 else 1)
    return _cost(network, codec, SyncCounts(rounds, rounds, rounds), partitions, partitions)


CompressedFunction = Callable[[Network, CodecCurves, int, int], CompressedCost]
COMPRESSED: dict[str, CompressedFunction] = {
    "ring": compressed_ring,
    "parameter_server": compressed_parameter_server,
    "recursive_doubling": compressed_recursive_doubling,
}


def _cost(network: Network, codec: CodecCurves, count: SyncCounts, pieces: int, batches: int) -> CompressedCost:
    """Add up `batches` times Eq. 2 for one of `pieces` parts.

    n tensors cut into K pieces are n + K - 1 calls of the codec. One tensor's share of them is c; the other K - 1
    stand in a.
    """
    beta = network.beta_seconds_per_byte
    calls = count.encodes * codec.encode.least_seconds + count.decodes * codec.decode.least_seconds
    calls += count.sends * beta * codec.fixed_nbytes
    per_byte = (
        count.sends * beta * codec.ratio
        + count.encodes * codec.encode.seconds_per_byte
        + count.decodes * codec.decode.seconds_per_byte
    )
    share = batches / pieces
    startup = batches * (count.sends * network.alpha_seconds + calls) - share * calls
    return CompressedCost(LinearCost(startup, share * per_byte), share * calls)
