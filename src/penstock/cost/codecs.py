"""What compression costs in a synchronisation: HiPress Eq. 1-2 and Table 3.

A gradient of m bytes is cut into K partitions. Without a codec, synchronising it takes `alpha T_send(m/K)`; with one
of ratio r, `alpha T_send(r m/K) + beta T_enc(m/K) + gamma T_dec(m/K)`. Here alpha, beta and gamma are *counts* of
serial sends, encodes and decodes (Table 3), not the network's constants. More than N partitions go in ceil(K/N)
batches, each of at most N. The paper writes T_dec of the payload's bytes; our curves are of the gradient's.
"""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.curves import CodecCurves, Curve
from penstock.errors import NetworkError

__all__ = ["CASYNC", "CodecCurves", "CountFunction", "Curve", "SyncCounts", "sync_seconds"]


@dataclass(frozen=True, slots=True)
class SyncCounts:
    """How many sends, encodes and decodes stand one after the other (Table 3)."""

    sends: int
    encodes: int
    decodes: int


def casync_ring_counts(workers: int, partitions: int) -> SyncCounts:
    """CaSync-Ring: 2(N-1) sends; N encodes and N decodes that no transmission hides."""
    return SyncCounts(2 * (workers - 1), workers, workers)


def casync_ps_counts(workers: int, partitions: int) -> SyncCounts:
    """CaSync-PS with dedicated aggregators, as Table 3 has it."""
    return SyncCounts(2 * workers, partitions + 1, workers + 1)


def casync_ps_colocated_counts(workers: int, partitions: int) -> SyncCounts:
    """CaSync-PS with aggregators on the workers, as section 6 ran it (erratum 7)."""
    return SyncCounts(2 * (workers - 1), partitions, workers)


CountFunction = Callable[[int, int], SyncCounts]
CASYNC: dict[str, CountFunction] = {
    "casync_ring": casync_ring_counts,
    "casync_ps": casync_ps_counts,
    "casync_ps_colocated": casync_ps_colocated_counts,
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
