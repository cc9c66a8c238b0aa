"""What each idea of HiPress adds, replayed on emulated hosts: its Fig. 11 as our own table; and `joint` beside others.

Communication and compression are real, computation is waiting as long as the trace says.
"""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from penstock.bench.casync_worker import CasyncJob
from penstock.bench.jobs import Done, Place, run_job

WORKER = "penstock.bench.casync_worker"
_TIMEOUT_SECONDS = 900.0


def casync_rows(place: Place, job: CasyncJob, done: Done) -> Iterator[dict[str, Any]]:
    """Measure the job at a place; each row says how much faster it is than the one before it and than the first."""
    before = first = None
    for row in run_job(place, WORKER, asdict(job), partial(_tell, done, place), _TIMEOUT_SECONDS):
        seconds = row["measured_seconds"]
        first = first or seconds
        gain = {"times_as_fast_as_before": (before or seconds) / seconds} if job.study == "steps" else {}
        yield {"hosts": place.hosts, "rate": place.rate, **row, **gain, "times_as_fast": first / seconds}
        before = seconds


def _tell(done: Done, place: Place, what: str) -> None:
    done(f"{place.hosts} hosts at {place.rate}, {what}")
