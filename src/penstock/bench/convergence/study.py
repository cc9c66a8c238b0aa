"""Every method, number of workers and seed on one task, many runs at a time."""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from penstock.bench.convergence.graphs import Graphed
from penstock.bench.convergence.method import Method
from penstock.bench.convergence.tasks import Task
from penstock.bench.convergence.training import Graph, Run, train


@dataclass(frozen=True, slots=True)
class Study:
    """What to run on a task."""

    methods: tuple[Method, ...]
    workers: tuple[int, ...]
    seeds: tuple[int, ...]
    epochs: int
    judged: int  # how often the held-out metric is taken
    seconds: float = math.inf  # after which no further run begins

    def runs(self) -> list[tuple[Method, int, int]]:
        """Return (method, workers, seed), the most interesting first: a study may be cut short."""
        return [(method, p, seed) for seed in self.seeds for p in self.workers for method in self.methods]


def run_study(task: Task, study: Study, device: str, at_once: int, done: Callable[[dict[str, Any]], None]) -> None:
    """Do all runs, `at_once` at a time; `done` gets each row as it is finished."""
    lock = threading.RLock()
    every = max(1, study.epochs // study.judged)
    end = time.monotonic() + study.seconds

    def one(method: Method, workers: int, seed: int) -> None:
        if time.monotonic() > end:
            return
        stream = torch.cuda.Stream() if device == "cuda" else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream) if stream else nullcontext():
            with lock:
                run = Run(task, method, workers, seed, device, study.epochs)
            curve = train(run, _graph(run, lock), lock, every)
        done({"task": task.name, "method": method.name, "workers": workers, "seed": seed, "metric_name": task.metric,
              "better": task.better,
              "epochs": study.epochs, "judged_every": every, "losses": curve.losses, "metrics": curve.metrics,
              "final": curve.metrics[-1]})  # fmt: skip

    with ThreadPoolExecutor(at_once) as pool:
        for result in [pool.submit(one, *each) for each in study.runs()]:
            result.result()


def _graph(run: Run, lock: threading.RLock) -> Graph:
    """Return what makes graphs where there is a GPU, and leaves work as it is elsewhere."""
    if run.device != "cuda":
        return lambda work: work
    return lambda work: Graphed(work, run.rounding, lock)
