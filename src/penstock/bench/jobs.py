"""Runs a benchmark's workers on emulated hosts and brings home what rank 0 reports, one JSON object per line."""

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.cluster.emulate import emulated_cluster
from penstock.errors import ClusterError

PREFIX = "penstock-bench "  # of the lines that are results; everything else a worker prints is talk
Done = Callable[[str], None]  # told what was just finished, for progress


@dataclass(frozen=True, slots=True)
class Place:
    """The emulated hosts a job runs on."""

    hosts: int
    rate: str  # of each NIC, as `penstock cluster run --rate` takes it


def report(rank: int, document: Mapping[str, Any]) -> None:
    """Hand a result to whoever started this worker; only rank 0's is printed."""
    if rank == 0:
        print(PREFIX + json.dumps(document), flush=True)


def run_job(
    place: Place,
    module: str,
    job: Mapping[str, Any],
    done: Done,
    timeout_seconds: float,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `python -m module JOB` on every host and return rank 0's results; raise `ClusterError` where a rank fails.

    Results that say only `done` are progress and go to `done`. `environment` is added to what a worker has.
    """
    output = Output(done)
    command = [sys.executable, "-m", module, json.dumps(job)]
    with emulated_cluster(place.hosts, place.rate) as cluster:
        outcome = cluster.run(command, environment=environment, sink=output, timeout_seconds=timeout_seconds)
    if outcome.exit_code != 0:
        raise ClusterError(output.complaint(outcome.failed_rank, outcome.exit_code))
    return output.results


class Output:
    """Takes the workers' lines: results and progress of rank 0, and what each rank said before it failed."""

    def __init__(self, done: Done) -> None:
        self.results: list[Any] = []
        self._done = done
        self._said: dict[int, list[str]] = defaultdict(list)

    def __call__(self, rank: int, stream: str, line: str) -> None:
        """Take one line."""
        if not line.startswith(PREFIX):
            self._said[rank].append(line.strip())
            return
        document = json.loads(line.removeprefix(PREFIX))
        if set(document) == {"done"}:
            self._done(document["done"])
        else:
            self.results.append(document)

    def complaint(self, failed_rank: int | None, exit_code: int) -> str:
        """Return the line that best says why a rank failed: its last one that names an error."""
        rank = 0 if failed_rank is None else failed_rank
        said = [line for line in self._said[rank] if line]
        named = [line for line in said if "Error" in line or "what():" in line]
        reason = (named or said or ["it printed nothing"])[-1].removeprefix("what():").strip()
        return f"rank {rank} ended with exit code {exit_code}: {reason}"
