"""Links that cost less processor time: one plain token bucket instead of two.

`cluster.links` limits short bursts with a second, small bucket, for which the kernel cuts packets of up to 64 KB into
frames. With eight hosts on two cores that work, not the rate, decides: eight ranks that all send at 1 Gb/s then take
1.4x as long as the rate asks. A plain bucket of 256 KB passes whole packets. Its price: after a pause 256 KB pass at
once, so that short messages look cheaper than on a cable; for what is compared here, megabytes, that is 2 ms at most.
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
