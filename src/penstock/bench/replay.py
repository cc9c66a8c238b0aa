"""Replayed iterations and single messages on emulated hosts, measured beside simulated.

Three questions share this: which planner is fastest and how well it was predicted (`replay`), what more hosts do
(`scaling`), and what other rates do (`rates`). Simulated times come from the network as measured in the same run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from penstock.bench.jobs import Done, Place, run_job
from penstock.bench.replay_worker import ReplayJob
from penstock.cluster.rates import parse_rate

WORKER = "penstock.bench.replay_worker"
_TIMEOUT_SECONDS = 900.0


def replay_rows(places: Sequence[Place], job: ReplayJob, done: Done) -> Iterator[dict[str, Any]]:
    """Measure the job at every place; rows come place by place."""
    for place in places:
        tell = partial(_tell, done, place)
        for row in run_job(place, WORKER, asdict(job), tell, _TIMEOUT_SECONDS):
            yield {"hosts": place.hosts, "rate": place.rate, **row, **_floor(place, row, job)}


def count_steps(places: Sequence[Place], job: ReplayJob) -> int:
    """Return how often `done` will be called."""
    replayed = len(job.traces) * len(job.planners) * (job.iterations + 1)
    return len(places) * (replayed + len(job.strategies) * (job.repetitions + 1))


def _tell(done: Done, place: Place, what: str) -> None:
    done(f"{place.hosts} hosts at {place.rate}, {what}")


def _floor(place: Place, row: dict[str, Any], job: ReplayJob) -> dict[str, Any]:
    """Return what the wire alone would take for one message: each NIC must send 2 (p - 1) / p of its bytes."""
    bits_per_second = parse_rate(place.rate)
    if not row["what"].startswith("all-reduce") or bits_per_second is None:
        return {}
    return {"floor_seconds": 2 * (place.hosts - 1) / place.hosts * job.message_nbytes * 8 / bits_per_second}
