"""How much memory does a rank need at most? Ours in all its phases, beside torch's own with gradients in its buckets.

Every run is made of fresh processes, so that nothing is left over from another method. Methods take turns.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from penstock.bench.claim import Claim
from penstock.bench.jobs import Done, Place, run_job
from penstock.bench.memory_worker import MemoryJob

WORKER = "penstock.bench.memory_worker"
VIEWS = "ddp-views"  # the peer
METHODS = (VIEWS, "penstock-exact", "penstock-exact-native")
PROFILE, ITERATIONS = 3, 7
MOST = 1.01  # of the peer's peak
_TIMEOUT_SECONDS = 120.0
Row = Mapping[str, Any]


def memory_rows(
    models: Sequence[tuple[str, int]], methods: Sequence[str], repetitions: int, done: Done
) -> Iterator[dict[str, Any]]:
    """Yield a row for every model and method: medians over repetitions of the rank that needs most."""
    for model, batch in models:
        found: dict[str, list[dict[str, int]]] = {method: [] for method in methods}
        for _ in range(repetitions):
            for method, peaks in found.items():
                job = MemoryJob(model, batch, method, PROFILE, ITERATIONS)
                peaks += run_job(Place(2, "none"), WORKER, asdict(job), done, _TIMEOUT_SECONDS)
        yield from compared([_row(model, batch, method, peaks) for method, peaks in found.items()])


def _row(model: str, batch: int, method: str, found: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    peaks = [each["peak_nbytes"] for each in found]
    return {
        "hosts": 2,
        "model": model,
        "batch": batch,
        "method": method,
        "peak_nbytes": median(peaks),
        "spread_nbytes": max(peaks) - min(peaks),
        "imports_nbytes": median(each["imports_nbytes"] for each in found),
        "samples": len(peaks),
    }


def compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add what each peak is beside torch's with gradients in its buckets."""
    peer = next((row["peak_nbytes"] for row in rows if row["method"] == VIEWS), None)
    return [row | {"ratio_to_views": row["peak_nbytes"] / peer if peer else None} for row in rows]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Return what is asked of our wrapper."""
    return [
        Claim(f"peak memory over {VIEWS}, {row['method']}, {row['model']}", row["ratio_to_views"], MOST, at_most=True)
        for row in rows
        if str(row["method"]).startswith("penstock") and row["ratio_to_views"]
    ]
