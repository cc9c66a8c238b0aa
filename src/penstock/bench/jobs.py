"""Runs a benchmark's workers on emulated hosts or on loopback; rank 0 reports results, one JSON object per line.

Links are `smooth` (`cluster.links`: two token buckets, short bursts limited) or `coarse`: one plain bucket of 256 KB.
While packets of up to 64 KB did not fit the small bucket, the kernel cut them into frames, and on eight hosts and two
cores that decided: gloo's all-reduce of 16 MB took 347-350 ms on smooth links and 232-236 on coarse ones (floor 224).
Since packets are limited to what the small bucket holds (`links.packet_nbytes`) both cost about the same. On a coarse
link 256 KB pass at once after a pause, so that short messages look cheaper than on a cable; for megabytes that is 2 ms.
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.cluster.building import Bucket, Buckets, smooth_bucket
from penstock.cluster.emulate import emulated_cluster
from penstock.cluster.processes import Outcome, Sink, run_workers
from penstock.cluster.worker_commands import loopback_workers, mpirun_workers
from penstock.errors import ClusterError
from penstock.runtime.transport import Transport

PREFIX = "penstock-bench "  # of the lines that are results; everything else a worker prints is talk
LOOPBACK = "loopback"  # instead of a rate: this machine's own, without emulated hosts
Done = Callable[[str], None]  # told what was just finished, for progress
Job = TypeVar("Job")
Measure = Callable[[Transport, Job, Done], Iterable[dict[str, Any]]]
_BURST_NBYTES, _QUEUE_SECONDS = 256 * 1024, 20e-3


def plain_bucket(bits_per_second: int) -> Bucket:
    """Return one bucket of 256 KB whose queue holds 20 ms."""
    return Bucket(bits_per_second, _BURST_NBYTES, _BURST_NBYTES + round(bits_per_second / 8 * _QUEUE_SECONDS))


BUCKETS: dict[str, Buckets] = {"smooth": smooth_bucket, "coarse": plain_bucket}


@dataclass(frozen=True, slots=True)
class Place:
    """The hosts a job runs on."""

    hosts: int
    rate: str  # of each NIC, as `penstock cluster run --rate` takes it; or LOOPBACK
    links: str = "smooth"  # or coarse
    gpus: str = "none"  # or shared: all ranks on one GPU, NCCL between them
    ranks_per_host: int = 1  # those of a host talk over its loopback, unshaped

    def __post_init__(self) -> None:
        if self.links not in BUCKETS:
            raise ClusterError(f"links {self.links!r}; wanted {' or '.join(BUCKETS)}")

    @property
    def ranks(self) -> int:
        """Of all hosts."""
        return self.hosts * self.ranks_per_host


def report(rank: int, document: Mapping[str, Any]) -> None:
    """Hand a result to the process that started this worker; only rank 0's is printed."""
    if rank == 0:
        print(PREFIX + json.dumps(document), flush=True)


def run_job(
    place: Place,
    worker: Sequence[str],
    job: Mapping[str, Any],
    done: Done,
    timeout_seconds: float,
    environment: Mapping[str, str] | None = None,
    engine: str = "gloo",
) -> list[Any]:
    """Run `python WORKER JOB` on every host and return rank 0's results; raise `ClusterError` where a rank fails.

    `worker` is a module (`-m penstock.bench.replayed`) or a script with its arguments. Results that say only `done` are
    progress and go to `done`. `environment` is added to what a worker has.
    """
    output = Output(done)
    command = [sys.executable, *worker, json.dumps(job)]
    found = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **(environment or {})}
    outcome = _run(place, command, engine, found, output, timeout_seconds)
    if outcome.exit_code != 0:
        raise ClusterError(output.complaint(outcome.failed_rank, outcome.exit_code))
    return output.results


def _run(
    place: Place,
    command: Sequence[str],
    engine: str,
    environment: Mapping[str, str],
    output: Sink,
    timeout_seconds: float,
) -> Outcome:
    if place.rate == LOOPBACK:
        if engine == "mpi":
            workers = mpirun_workers(place.ranks, command, environment)
        else:
            workers = loopback_workers([command] * place.ranks, {**environment, "OMP_NUM_THREADS": "1"})
        return run_workers(workers, output, timeout_seconds=timeout_seconds)
    with emulated_cluster(place.hosts, place.rate, gpus=place.gpus, bucket=BUCKETS[place.links]) as cluster:
        if cluster.gpu is not None and cluster.gpu.complaint:
            print(f"penstock: {cluster.gpu.complaint}", file=sys.stderr)
        return cluster.run(
            command,
            engine=engine,
            per_host=place.ranks_per_host,
            environment=environment,
            sink=output,
            timeout_seconds=timeout_seconds,
        )


def serve(read_job: Callable[[dict[str, Any]], Job], measure: Measure[Job]) -> None:
    """Measure the job given as JSON at the end of the command line, as one rank of a gloo group.

    Rank 0 reports each row, and what was just done, for progress.
    """
    import torch.distributed as dist

    from penstock.runtime.transport.c10d import C10dTransport
    from penstock.runtime.transport.meeting import join_group

    job = read_job(json.loads(sys.argv[-1]))
    join_group("gloo")
    rank = dist.get_rank()
    for row in measure(C10dTransport(), job, lambda name: report(rank, {"done": name})):
        report(rank, row)
    dist.barrier()
    dist.destroy_process_group()


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
