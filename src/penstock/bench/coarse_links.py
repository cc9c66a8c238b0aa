"""Links of one plain token bucket instead of two, to compare with.

`cluster.links` limits short bursts with a second, small bucket. While packets of up to 64 KB did not fit it, the kernel
cut them into frames, and on eight hosts and two cores that decided: gloo's own all-reduce of 16 MB took 347-350 ms on
those links and 232-236 on plain buckets of 256 KB (floor 224). Since packets are limited to what the small bucket
holds (`links.packet_nbytes`) both cost about the same. The price of a plain bucket: after a pause 256 KB pass at once,
so that short messages look cheaper than on a cable; for megabytes that is 2 ms at most.
"""

from collections.abc import Sequence

from penstock.cluster.tools import run_command

BURST = "256kb"
QUEUE = "20ms"


def run_with_plain_buckets(argv: Sequence[str], stdin: str = "", keep_open: Sequence[int] = ()) -> tuple[int, str, str]:
    """Run a command of the cluster's set-up, with plain buckets where it makes buckets."""
    return run_command(plain_bucket(argv), stdin, keep_open)


def plain_bucket(argv: Sequence[str]) -> Sequence[str]:
    """Return the command with a plain bucket of the same rate, if it makes a bucket.

    >>> " ".join(plain_bucket("tc qdisc add dev e root tbf rate 9bit burst 1 limit 2 peakrate 10bit mtu 3".split()))
    'tc qdisc add dev e root tbf rate 9bit burst 256kb latency 20ms'
    """
    if argv[0] != "tc" or "tbf" not in argv:
        return argv
    rate = argv[argv.index("rate") + 1]
    return [*argv[: argv.index("tbf") + 1], "rate", rate, "burst", BURST, "latency", QUEUE]
