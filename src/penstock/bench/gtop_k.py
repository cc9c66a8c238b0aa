"""gTop-k's Table VII replayed on emulated hosts: `penstock bench gtop-k`, for `penstock reproduce gtop-k --record`."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from penstock.bench.coarse_links import BUCKETS
from penstock.bench.gtop_k_worker import Case
from penstock.bench.jobs import Output, Place
from penstock.cluster.emulate import emulated_cluster
from penstock.errors import ClusterError
from penstock.reproduce.gtop_k import DENSITY, MODELS

_TIMEOUT_SECONDS = 400.0


def cases(names: Sequence[str]) -> list[Case]:
    """Return the models of the table, by name."""
    known = {model.name: model for model in MODELS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ClusterError(f"no model {unknown[0]!r} in Table VII; it has {', '.join(known)}")
    chosen = [known[name] for name in names]
    return [Case(model.name, model.parameters, model.compute_seconds, model.compress_seconds) for model in chosen]


def replayed_rows(
    place: Place, models: Sequence[Case], engine: str, links: str, iterations: int
) -> Iterator[dict[str, Any]]:
    """Replay the models on all hosts; yield a row for each model and method."""
    job = {
        "engine": engine,
        "density": DENSITY,
        "iterations": iterations,
        "cases": [asdict(model) for model in models],
    }
    output = Output(lambda _: None)
    command = [sys.executable, "-m", "penstock.bench.gtop_k_worker", json.dumps(job)]
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if links not in BUCKETS:
        raise ClusterError(f"links {links!r}; wanted {' or '.join(BUCKETS)}")
    with emulated_cluster(place.hosts, place.rate, bucket=BUCKETS[links]) as cluster:
        outcome = cluster.run(
            command, engine=engine, environment=environment, sink=output, timeout_seconds=_TIMEOUT_SECONDS
        )
    if outcome.exit_code != 0:
        raise ClusterError(output.complaint(outcome.failed_rank, outcome.exit_code))
    for document in output.results:
        times = document.pop("times")
        where = {"hosts": place.hosts, "rate": place.rate, "engine": engine, "links": links}
        spread = {"spread": max(times) - min(times), "samples": len(times)}
        yield {**where, **document, "seconds": median(times), **spread}
