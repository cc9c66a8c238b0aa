"""Links of one plain token bucket instead of two, to compare with.

`cluster.links` limits short bursts with a second, small bucket. While packets of up to 64 KB did not fit it, the kernel
cut them into frames, and on eight hosts and two cores that decided: gloo's own all-reduce of 16 MB took 347-350 ms on
those links and 232-236 on plain buckets of 256 KB (floor 224). Since packets are limited to what the small bucket
holds (`links.packet_nbytes`) both cost about the same. The price of a plain bucket: after a pause 256 KB pass at once,
so that short messages look cheaper than on a cable; for megabytes that is 2 ms at most.
"""

from penstock.cluster.links import Bucket, Buckets, smooth_bucket

BURST_NBYTES = 256 * 1024
QUEUE_SECONDS = 20e-3


def plain_bucket(bits_per_second: int) -> Bucket:
    """Return one bucket of 256 KB whose queue holds 20 ms."""
    return Bucket(bits_per_second, BURST_NBYTES, BURST_NBYTES + round(bits_per_second / 8 * QUEUE_SECONDS))


BUCKETS: dict[str, Buckets] = {"smooth": smooth_bucket, "coarse": plain_bucket}
