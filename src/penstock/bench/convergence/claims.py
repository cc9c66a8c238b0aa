"""What a convergence study was asked to show: compressed training ends where dense training ends."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.bench.claim import Claim
from penstock.bench.convergence.summary import against_dense

_NEAR = 0.01  # of dense's final metric
_KINDS = ("gtopk", "onebit", "terngrad", "dgc")  # topk and gtopk-published are there to be compared with


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Return how far each method ends behind dense, and how gtopk fares against the published rule."""
    found = against_dense(rows)
    ends = {(line["workers"], line["method"]): line["final"] for line in found if "final" in line}
    behind = [
        Claim(f"{line['method']}, {line['workers']} workers, behind dense", line["worse_than_dense"], _NEAR, True)
        for line in found
        if line["method"].startswith(_KINDS) and not _published(line["method"]) and "worse_than_dense" in line
    ]
    higher = any(row["better"] == "higher" for row in rows)
    pairs = [
        (workers, method, end, ends.get((workers, method.replace("gtopk", "gtopk-published", 1))))
        for (workers, method), end in ends.items()
        if method.startswith("gtopk ")
    ]
    return behind + [
        Claim(f"{method}, {workers} workers, over gtopk-published", end / other if higher else other / end, 1.0)
        for workers, method, end, other in pairs
        if other is not None
    ]


def _published(method: str) -> bool:
    return method.startswith("gtopk-published")
