"""How closely emulated links hold their rate: all pairs of 4 hosts, alone and together, 100 Mb/s to 2 Gb/s.

And what they do to single messages after a pause, where token buckets are full and flatter most.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from penstock.cluster import probes
from penstock.cluster.check import Measured, check_cluster, worst_deviation
from penstock.cluster.emulate import emulated_cluster
from penstock.cluster.processes import Collected
from penstock.cluster.topology import parse_rate
from penstock.errors import ClusterError

RATES = ("100mbit", "250mbit", "500mbit", "1gbit", "2gbit")
HOSTS = 4
MESSAGE_RATES = ("100mbit", "1gbit", "2gbit")
MESSAGE_NBYTES = (1_000, 10_000, 100_000, 1_000_000)


def link_rows(rates: Sequence[str] = RATES, hosts: int = HOSTS, seconds: float = 0.2) -> Iterator[dict[str, Any]]:
    """Check a cluster per rate; rows come as they are measured."""
    for rate in rates:
        with emulated_cluster(hosts, rate) as cluster:
            measured = check_cluster(cluster, seconds)
        for mode in ("alone", "together"):
            yield _row(rate, mode, [pair for pair in measured if pair.mode == mode])


def message_rows(
    rates: Sequence[str] = MESSAGE_RATES, sizes: Sequence[int] = MESSAGE_NBYTES
) -> Iterator[dict[str, Any]]:
    """Time single messages between two hosts, each after a pause; `asked_seconds` is the size over the rate."""
    command = [sys.executable, str(Path(probes.__file__)), "messages", json.dumps(list(sizes))]
    for rate in rates:
        seen = Collected()
        with emulated_cluster(2, rate) as cluster:
            outcome = cluster.run(command, sink=seen, timeout_seconds=120)
        if outcome.exit_code != 0:
            raise ClusterError(
                f"messages at {rate} could not be timed: {seen.text(outcome.failed_rank or 0, 'stderr')}"
            )
        bits_per_second = parse_rate(rate)
        for line in map(json.loads, seen.text(0).splitlines()):
            asked = 0.0 if bits_per_second is None else line["nbytes"] * 8 / bits_per_second
            yield {"rate": rate, **line, "asked_seconds": asked}


def _row(rate: str, mode: str, pairs: Sequence[Measured]) -> dict[str, Any]:
    deviations = [pair.deviation for pair in pairs if pair.deviation is not None]
    return {
        "rate": rate,
        "asked_bits_per_second": parse_rate(rate),
        "pairs": mode,
        "transfers": len(pairs),
        "median_bits_per_second": median(pair.bits_per_second for pair in pairs),
        "least_deviation": min(deviations),
        "largest_deviation": max(deviations),
        "worst_deviation": worst_deviation(pairs),
        "latency_seconds": median(pair.latency_seconds for pair in pairs),
    }
