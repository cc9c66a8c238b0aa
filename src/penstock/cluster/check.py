"""Measuring what an emulated cluster delivers, and comparing it with what was asked.

Two questions: what each pair gets when it is alone, in both directions; and what disjoint pairs get at once, round
after round until every pair has met (a switch must not be shared where cables are not).
"""

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from penstock.cluster.emulate import EmulatedCluster
from penstock.cluster.processes import Collected
from penstock.cluster.topology import Layout
from penstock.errors import ClusterError

PROBES = Path(__file__).with_name("probes.py")
UNSHAPED_BITS_PER_SECOND = 10**10  # how much to send where no rate says how much is enough
TRIALS = 3
Pair = tuple[int, int]  # source and target host


@dataclass(frozen=True, slots=True)
class Measured:
    """What one pair of hosts got."""

    mode: str  # "alone" or "together"
    source: int
    target: int
    asked_bits_per_second: float | None  # None where the path has no limit
    bits_per_second: float  # TCP payload
    latency_seconds: float  # half the round trip of one byte

    @property
    def deviation(self) -> float | None:
        """Delivered over asked, less one; None where nothing was asked."""
        return None if self.asked_bits_per_second is None else self.bits_per_second / self.asked_bits_per_second - 1


def check_cluster(cluster: EmulatedCluster, seconds: float = 0.2, timeout_seconds: float = 600.0) -> list[Measured]:
    """Measure all pairs, alone and together: the median of three transfers of about `seconds` each."""
    if len(cluster.layout.hosts) < 2:
        raise ClusterError("one host has no other to talk to; check at least 2")
    alone = [[pair] for pair in itertools.permutations(range(len(cluster.layout.hosts)), 2)]
    together = disjoint_rounds(len(cluster.layout.hosts))
    rounds = alone + together
    plan = probe_plan(cluster.layout, rounds, seconds)
    seen = Collected()
    outcome = cluster.run(
        [sys.executable, str(PROBES), "transfers", json.dumps(plan)], sink=seen, timeout_seconds=timeout_seconds
    )
    if outcome.exit_code != 0:
        said = seen.text(outcome.failed_rank or 0, "stderr").strip().splitlines()
        raise ClusterError(
            f"host {outcome.failed_rank} could not be measured: {said[-1] if said else 'it said nothing'}"
        )
    lines = [json.loads(line) for host in cluster.layout.hosts for line in seen.text(host.index).splitlines()]
    return summarize(cluster.layout, rounds, len(alone), lines)


def summarize(
    layout: Layout, rounds: Sequence[Sequence[Pair]], alone: int, lines: Sequence[Mapping[str, float]]
) -> list[Measured]:
    """Turn the probes' lines into one result per pair and round; the first `alone` rounds have one pair each."""
    measured = []
    for index, pairs in enumerate(rounds):
        for pair in pairs:
            trials = [line for line in lines if (line["round"], line["source"], line["target"]) == (index, *pair)]
            assert trials, f"round {index} has no result for {pair}"
            measured.append(
                Measured(
                    mode="alone" if index < alone else "together",
                    source=pair[0],
                    target=pair[1],
                    asked_bits_per_second=asked_rate(layout, pair, pairs),
                    bits_per_second=median(trial["bits_per_second"] for trial in trials),
                    latency_seconds=median(trial["latency_seconds"] for trial in trials),
                )
            )
    return measured


def disjoint_rounds(hosts: int) -> list[list[Pair]]:
    """Return rounds of disjoint pairs in which every ordered pair appears once: a tournament, then the same reversed.

    The circle method: one player stays, the others move on by one seat each round; with an odd number, one sits out.

    >>> disjoint_rounds(4)[:3]
    [[(0, 3), (1, 2)], [(0, 2), (3, 1)], [(0, 1), (2, 3)]]
    """
    seats: list[int | None] = [*range(hosts), *([None] if hosts % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        opposite = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        rounds.append([(a, b) for a, b in opposite if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds + [[(b, a) for a, b in pairs] for pairs in rounds]


def asked_rate(layout: Layout, pair: Pair, at_once: Sequence[Pair]) -> float | None:
    """Return what a pair should get while the pairs `at_once` talk: its slowest NIC, or its fair part of an uplink."""
    source, target = (layout.hosts[index] for index in pair)
    limits = [float(host.bits_per_second) for host in (source, target) if host.bits_per_second is not None]
    if source.rack != target.rack and layout.uplink_bits_per_second is not None:
        for end, rack in ((0, source.rack), (1, target.rack)):
            crossing = [other for other in at_once if _crosses(layout, other) and layout.hosts[other[end]].rack == rack]
            limits.append(layout.uplink_bits_per_second / len(crossing))
    return min(limits, default=None)


def probe_plan(layout: Layout, rounds: Sequence[Sequence[Pair]], seconds: float) -> dict[str, object]:
    """Return what the probes on the hosts do: enough bytes for `seconds` at the rate that was asked."""

    def nbytes(pair: Pair, at_once: Sequence[Pair]) -> int:
        return round((asked_rate(layout, pair, at_once) or UNSHAPED_BITS_PER_SECOND) / 8 * seconds)

    return {
        "trials": TRIALS,
        "addresses": [host.address for host in layout.hosts],
        "rounds": [[[*pair, nbytes(pair, pairs)] for pair in pairs] for pairs in rounds],
    }


def worst_deviation(measured: Sequence[Measured]) -> float:
    """Return the largest deviation, either way, of pairs alone and of the mean over pairs together.

    Together, TCP shares an uplink unevenly among its connections; their mean is what the link delivers.
    """
    alone = [abs(one.deviation) for one in measured if one.mode == "alone" and one.deviation is not None]
    together = [one.deviation for one in measured if one.mode == "together" and one.deviation is not None]
    mean = [abs(sum(together) / len(together))] if together else []
    return max(alone + mean, default=0.0)


def _crosses(layout: Layout, pair: Pair) -> bool:
    return layout.hosts[pair[0]].rack != layout.hosts[pair[1]].rack
