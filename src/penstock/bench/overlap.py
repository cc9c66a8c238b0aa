"""Compression beside the backward pass of a GPU: what it costs a step, and how much of it is hidden.

With one worker nothing is sent, so a step by our wrapper with a codec against the bare model is what wrapper and
compression cost; stock DDP beside it says how much of that is torch's own. Two workers share a GPU over gloo, which
shows that it works, not how fast two GPUs are: they take turns on it.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from penstock.bench.claim import Claim
from penstock.bench.jobs import Done, Output
from penstock.bench.overlap_worker import COMPRESSED, METHODS, OverlapJob
from penstock.cluster.launch import run_workers
from penstock.cluster.workers import Worker
from penstock.errors import ClusterError
from penstock.train.launch import loopback_settings

WORKER = "penstock.bench.overlap_worker"
BARE, STOCK = "no-communication", "ddp"
_TIMEOUT_SECONDS = 300.0


def overlap_rows(job: OverlapJob, workers: int, done: Done) -> tuple[str, list[dict[str, Any]]]:
    """Return the GPU's name and a row for each method, with so many workers on this machine."""
    output = Output(done)
    command = (sys.executable, "-m", WORKER, json.dumps(asdict(job)))
    started = [
        Worker(rank, ("env", *settings, *command)) for rank, settings in enumerate(loopback_settings(workers, 4))
    ]
    outcome = run_workers(started, output, timeout_seconds=_TIMEOUT_SECONDS)
    if outcome.exit_code:
        raise ClusterError(output.complaint(outcome.failed_rank, outcome.exit_code))
    device, *rows = output.results
    return device["device"], with_slowdown(rows)


def with_slowdown(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Say of each method how much longer it takes than the bare model, and than stock DDP.

    >>> rows = [{"method": "no-communication", "iteration_seconds": 1.0}, {"method": "ddp", "iteration_seconds": 2.0}]
    >>> rows = with_slowdown([*rows, {"method": "penstock-onebit", "iteration_seconds": 2.5}])
    >>> [(row["slowdown"], row["against_ddp"]) for row in rows]
    [(0.0, -0.5), (1.0, 0.0), (1.5, 0.25)]
    """
    seconds = {row["method"]: row["iteration_seconds"] for row in rows}
    return [
        {**row, "slowdown": own / seconds[BARE] - 1, "against_ddp": own / seconds[STOCK] - 1}
        for row, own in zip(rows, seconds.values(), strict=True)
    ]


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """Return what was asked: compressing slows a step without communication by less than 3%."""
    return [
        Claim(f"{row['method']}, {row['model']}, batch {row['batch']}, 1 worker: slowdown", row["slowdown"], 0.03, True)
        for row in rows
        if row["workers"] == 1 and row["method"] in COMPRESSED
    ]


def count_steps(workers: Sequence[int], models: int) -> int:
    """Return how often `done` will be called."""
    return len(workers) * models * len(METHODS)
