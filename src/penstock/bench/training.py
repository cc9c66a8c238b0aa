"""Iterations of real training on emulated hosts: stock DDP in several settings and our own, in turn.

An iteration is forward, backward with communication, and the optimizer's step, from the end of one on the last rank to
the end of the next on the last rank. `exposed_seconds` is what it takes longer than `no-communication`, the bare module
trained by every rank for itself.
"""

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from penstock.bench.jobs import Done, Place, run_job
from penstock.bench.training_worker import ALONE, DEFAULT, METHODS, STOCK, TrainJob, find_method
from penstock.errors import ClusterError, PenstockError
from penstock.zoo import ZOO

WORKER = ("-m", "penstock.bench.training_worker")
_TIMEOUT_SECONDS = 900.0
# The C library gives memory of gradients back to the kernel, or keeps it, by where they happen to lie: the bare model,
# which makes them anew in each iteration, took 217 ms where they were kept, and 265 where their pages were made anew.
_KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
_RISKY_TIMEOUT_SECONDS = 60.0  # a method that may crash may also hang


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure."""

    rounds: int
    iterations: int  # of each method and round
    warmup: int
    profile: int  # iterations that planning methods profile


def parse_models(text: str) -> list[tuple[str, int]]:
    """Return names and batches; a batch of 0 is the zoo's own.

    >>> parse_models("vgg16_cifar:8,resnet20")
    [('vgg16_cifar', 8), ('resnet20', 0)]
    """
    found = []
    for part in text.split(","):
        name, _, batch = part.strip().partition(":")
        if name not in ZOO:
            raise PenstockError(f"--models: no model of the zoo is called {name!r}; wanted some of {', '.join(ZOO)}")
        if batch and not (batch.isascii() and batch.isdigit() and int(batch) > 0):
            raise PenstockError(
                f"--models: found batch {batch!r} for {name}; wanted a whole number > 0, as in {name}:8"
            )
        found.append((name, int(batch or 0)))
    return found


def parse_methods(text: str) -> list[str]:
    """Return the methods of a comma-separated list; `no-communication` always comes first."""
    names = [part.strip() for part in text.split(",")]
    for name in names:
        find_method(name)
    return list(dict.fromkeys([ALONE, *names]))


def count_steps(methods: Sequence[str], rounds: int) -> int:
    """Return how often `done` will be called for one model, where nothing fails."""
    risky = sum(METHODS[name].risky for name in methods)
    return (len(methods) - risky + 2 * risky) * (1 + rounds)


def train_rows(
    place: Place, model: str, batch: int, methods: Sequence[str], effort: Effort, done: Done
) -> list[dict[str, Any]]:
    """Measure one model by every method; a method that fails gets a row with the error's text."""
    threads = max(1, len(os.sched_getaffinity(0)) // place.ranks)
    job = TrainJob(
        model,
        batch,
        tuple(name for name in methods if not METHODS[name].risky),
        **asdict(effort),
        threads=threads,
        device=_device(place),
    )
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:  # nothing is known from earlier runs
        kept = _KEEPS_MEMORY | {"XDG_CACHE_HOME": folder}
        found = _together(place, job, done, kept)
        found += [_by_itself(place, job, name, done, kept) for name in methods if METHODS[name].risky]
    order = {name: index for index, name in enumerate(methods)}
    rows = [_row(place, model, result) for result in sorted(found, key=lambda result: order[result["method"]])]
    return compared(rows)


def parse_startup(text: str) -> list[str]:
    """Return the methods of a comma-separated list, each of which must plan; `none` are none."""
    names = [] if text == "none" else [part.strip() for part in text.split(",")]
    for name in names:
        if not find_method(name).plans:
            raise PenstockError(f"--startup: {name} plans nothing; wanted methods that do, such as penstock-auto")
    return names


def startup_rows(
    place: Place, model: str, batch: int, methods: Sequence[str], profile: int, done: Done
) -> list[dict[str, Any]]:
    """Return how long each method takes until its plan is in force, in fresh processes.

    `cold`: nothing is kept, neither compiled kernels nor measurements. `warm`: what the cold start kept.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // place.ranks)
    rows = []
    for name in methods:
        job = TrainJob(model, batch, (name,), 0, 0, 0, profile, threads, device=_device(place), startup=True)
        with tempfile.TemporaryDirectory(prefix="penstock-startup-") as folder:
            kept = {each: f"{folder}/{each}" for each in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR")}
            for start in ("cold", "warm"):
                row = _where(place) | {"model": model, "method": name, "start": start}
                try:
                    (found,) = run_job(place, WORKER, asdict(job), done, _TIMEOUT_SECONDS, kept)
                    rows.append(row | found)
                except ClusterError as error:
                    rows.append(row | {"error": str(error)})
                done(f"{name}, {start} start")
    return rows


def _together(place: Place, job: TrainJob, done: Done, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the results of methods that take turns; where one takes the others down, of each by itself."""
    try:
        results = run_job(place, WORKER, asdict(job), done, _TIMEOUT_SECONDS, environment)
    except ClusterError as error:
        if len(job.methods) == 1:
            raise ClusterError(f"{job.methods[0]} on {place.hosts} hosts: {error}") from error
        results = [_by_itself(place, job, name, done, environment) for name in job.methods]
    return _with_exposed(results)


def _by_itself(place: Place, job: TrainJob, name: str, done: Done, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return one method's result from a process group of its own, with `no-communication` beside it."""
    alone = asdict(job) | {"methods": tuple(dict.fromkeys([ALONE, name]))}
    try:
        results = run_job(place, WORKER, alone, done, _RISKY_TIMEOUT_SECONDS, environment)
    except ClusterError as error:
        return {"method": name, "error": str(error)}
    return next(result for result in _with_exposed(results) if result["method"] == name)


def _with_exposed(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    found = list(results)
    alone = next(
        (median(result["seconds"]) for result in found if result["method"] == ALONE and "seconds" in result), None
    )
    return [result | {"alone_seconds": alone} for result in found]


def _row(place: Place, model: str, result: dict[str, Any]) -> dict[str, Any]:
    row = _where(place) | {"model": model, "method": result["method"]}
    if "error" in result:
        return row | {"error": result["error"]}
    times, alone = result["seconds"], result["alone_seconds"]
    return row | {
        "batch": result["batch"],
        "iteration_seconds": median(times),
        "spread": max(times) - min(times),
        "exposed_seconds": None if alone is None else median(times) - alone,
        "bytes_sent": median(result["nbytes"]),
        "messages": result["messages"],
        "strategies": result["strategies"],
        "predicted_seconds": result["predicted_seconds"],
        "samples": len(times),
    }


def _device(place: Place) -> str:
    return "cpu" if place.gpus == "none" else "cuda"


def _where(place: Place) -> dict[str, Any]:
    """Return what a row says of its place; ranks of a host and GPUs where there is something to say."""
    found: dict[str, Any] = {"hosts": place.hosts, "rate": place.rate}
    found |= {"ranks_per_host": place.ranks_per_host} if place.ranks_per_host > 1 else {}
    return found | ({"gpus": place.gpus} if place.gpus != "none" else {})


def compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add ratios to DDP as it comes, and to the best setting of its buckets: below 1 is faster than they are."""
    times = {row["method"]: row["iteration_seconds"] for row in rows if "error" not in row}
    stock = [seconds for name, seconds in times.items() if METHODS[name].kind == STOCK]

    def ratio(row: dict[str, Any], base: float | None) -> float | None:
        return row["iteration_seconds"] / base if base and "error" not in row else None

    return [
        row
        | {"ratio_to_ddp": ratio(row, times.get(DEFAULT)), "ratio_to_best_ddp": ratio(row, min(stock, default=None))}
        for row in rows
    ]
