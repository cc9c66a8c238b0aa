"""How closely emulated links hold their rate: all pairs of 4 hosts, alone and together, 100 Mb/s to 2 Gb/s."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from penstock.cluster.check import Measured, check_cluster, worst_deviation
from penstock.cluster.emulate import emulated_cluster
from penstock.cluster.rates import parse_rate

RATES = ("100mbit", "250mbit", "500mbit", "1gbit", "2gbit")
HOSTS = 4


def link_rows(rates: Sequence[str] = RATES, hosts: int = HOSTS, seconds: float = 0.2) -> Iterator[dict[str, Any]]:
    """Check a cluster per rate; rows come as they are measured."""
    for rate in rates:
        with emulated_cluster(hosts, rate) as cluster:
            measured = check_cluster(cluster, seconds)
        for mode in ("alone", "together"):
            yield _row(rate, mode, [pair for pair in measured if pair.mode == mode])


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
