"""How much memory does a rank need at most? Ours in all its phases, beside torch's own with gradients in its buckets.

Every run is made of fresh processes, so that nothing is left over from another method. Methods take turns.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from memory_worker import MemoryJob, find_wrapper
from penstock.bench.jobs import Done, Place, run_job
from penstock.bench.record import make_record, save_record
from penstock.bench.training import parse_models
from penstock.cli.options import JsonOption, RecordOption
from penstock.cli.output import print_json, print_table, progress
from study import Claim, claim_documents, print_claims, start

WORKER = (str(Path(__file__).with_name("memory_worker.py")),)
VIEWS = "ddp-views"  # the peer
METHODS = (VIEWS, "penstock-exact", "penstock-exact-native")
PROFILE, ITERATIONS = 3, 7
MOST = 1.01  # of the peer's peak
_TIMEOUT_SECONDS = 120.0
Row = Mapping[str, Any]
Found = Mapping[str, int]  # of one run
RATIOS = ("ratio_to_views", "ratio_range", "ratio_less_imports")


def memory_rows(
    models: Sequence[tuple[str, int]], methods: Sequence[str], repetitions: int, done: Done
) -> Iterator[dict[str, Any]]:
    """Yield a row for every model and method: medians over repetitions of the rank that needs most."""
    for model, batch in models:
        found: dict[str, list[Found]] = {method: [] for method in methods}
        for _ in range(repetitions):
            for method, runs in found.items():
                job = MemoryJob(model, batch, method, PROFILE, ITERATIONS)
                runs += run_job(Place(2, "none"), WORKER, asdict(job), done, _TIMEOUT_SECONDS)
        for method, runs in found.items():
            yield _row(model, batch, method, runs) | compared(runs, found.get(VIEWS))


def _row(model: str, batch: int, method: str, runs: Sequence[Found]) -> dict[str, Any]:
    peaks = [run["peak_nbytes"] for run in runs]
    return {
        "hosts": 2,
        "model": model,
        "batch": batch,
        "method": method,
        "peak_nbytes": median(peaks),
        "spread_nbytes": max(peaks) - min(peaks),
        "imports_nbytes": median(run["imports_nbytes"] for run in runs),
        "samples": len(peaks),
    }


def compared(runs: Sequence[Found], peers: Sequence[Found] | None) -> dict[str, Any]:
    """Return what the peaks are beside torch's with gradients in its buckets: whole processes, and less imports.

    The range is that of the ratios of runs that followed one another: the largest less the least.
    """
    if not peers:
        return {"ratio_to_views": None, "ratio_range": None, "ratio_less_imports": None}
    ratios = [_peak(run) / _peak(peer) for run, peer in zip(runs, peers, strict=True)]
    return {
        "ratio_to_views": median(map(_peak, runs)) / median(map(_peak, peers)),
        "ratio_range": max(ratios) - min(ratios),
        "ratio_less_imports": median(map(_less_imports, runs)) / median(map(_less_imports, peers)),
    }


def _peak(run: Found) -> int:
    return run["peak_nbytes"]


def _less_imports(run: Found) -> int:
    return run["peak_nbytes"] - run["imports_nbytes"]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Return what is asked of our wrapper; a codec keeps a residual of every gradient, and is not asked."""
    asked = [row for row in rows if row["method"] in METHODS and row["method"] != VIEWS and row["ratio_to_views"]]
    return [
        Claim(f"peak memory over {VIEWS}, {what}, {row['method']}, {row['model']}", row[name], MOST, at_most=True)
        for row in asked
        for what, name in (("whole processes", "ratio_to_views"), ("less imports", "ratio_less_imports"))
    ]


def memory(
    models: Annotated[str, typer.Option(help="of the zoo, each with its batch per rank")] = "vgg16_cifar:8,resnet50:2",
    methods: Annotated[str, typer.Option(help="ways of training; default: stock with views, ours")] = "",
    repetitions: Annotated[int, typer.Option(help="runs of each, in fresh processes", min=1)] = 3,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Train by every method in fresh processes on two emulated hosts and compare their peaks. Needs root."""
    tasks = [(name, batch or 1) for name, batch in parse_models(models)]
    names = [part.strip() for part in methods.split(",")] if methods else list(METHODS)
    for name in names:
        find_wrapper(name)
    with progress("memory", len(tasks) * len(names) * repetitions) as done:
        rows = list(memory_rows(tasks, names, repetitions, done))
    answers = claim_documents(claims(rows))
    if out:
        save_record(make_record("memory", rows, claims=answers), out)
    if json:
        print_json({"rows": rows, "claims": answers})
        return
    print_table(
        "most memory that a rank's process held, MB",
        ("model", "batch", "method", "peak", "spread", "imports", "over ddp-views", "spread", "less imports"),
        [
            (
                *(row[name] for name in ("model", "batch", "method")),
                *(f"{row[name] / 1e6:.1f}" for name in ("peak_nbytes", "spread_nbytes", "imports_nbytes")),
                *(f"{row[name]:.4f}" if row[name] else "" for name in RATIOS),
            )
            for row in rows
        ],
    )
    print_claims(answers)


if __name__ == "__main__":
    start(memory)
