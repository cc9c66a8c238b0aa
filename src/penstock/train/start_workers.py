"""Starts the workers of a job on this machine, hands their events on, and says in one line why a job failed.

Engine gloo: we start them, as torchrun would. Engine mpi: mpirun does, and they form a gloo group as well, which torch
needs beside MPI.
"""

import json
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from penstock.cluster.building import NIC, run_command
from penstock.cluster.emulate import emulated_cluster
from penstock.cluster.processes import Outcome, Worker, free_port, run_workers
from penstock.cluster.worker_commands import FAILURES, find_mpirun, first_failure, plan_local_mpirun, rank_output
from penstock.errors import WorkerError
from penstock.train.events import STOP, WISHES, Event, Tell, Wish, event_from_line
from penstock.train.job import MPI, Job

MODULE = "penstock.train.worker"
KEPT_LINES = 40  # of each rank's talk
PATIENCE_SECONDS = 10.0  # for other ranks to notice that one failed


def run_job(job: Job, rate: str, threads: int, tell: Tell) -> bool:
    """Run the job to its end and return True, or False where it was stopped; raise `WorkerError` on failure.

    With `rate`, each worker is on an emulated host of its own; without, they are processes that talk over loopback.
    A first Ctrl-C lets the workers finish their step and save; a second ends them.
    """
    output = Output(tell)
    with _wishes() as wish:
        stopping = Stopping(wish, signal.SIGTERM if job.engine == MPI else signal.SIGKILL)
        if rate:
            with emulated_cluster(job.workers, rate) as cluster:
                outcome = cluster.run(
                    _command(job.on(f"emulated hosts, {rate}", NIC), 0),
                    engine=job.engine,
                    environment={"OMP_NUM_THREADS": str(threads)},
                    sink=output,
                    grace_seconds=PATIENCE_SECONDS,
                    forward=stopping,
                )
        elif job.engine == MPI:
            outcome = _run_mpi(job, threads, output, stopping)
        else:
            outcome = run_workers(_on_loopback(job, threads), output, PATIENCE_SECONDS, forward=stopping)
    if outcome.exit_code and not wish.made:
        raise WorkerError(output.complaint(outcome))
    return output.finished


def _command(job: Job, local_rank: int) -> list[str]:
    return [sys.executable, "-m", MODULE, json.dumps(job.document()), str(local_rank), str(job.workers)]


def _on_loopback(job: Job, threads: int) -> list[Worker]:
    """Return the workers with torchrun's environment."""
    return [
        Worker(rank, ("env", *settings, *_command(job, rank)))
        for rank, settings in enumerate(loopback_settings(job.workers, threads))
    ]


def loopback_settings(workers: int, threads: int) -> list[list[str]]:
    """Return what `env` sets for each of the workers on this machine."""
    common = {**_meeting(threads), "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
    return [_settings({**common, "RANK": rank, "LOCAL_RANK": rank}) for rank in range(workers)]


def _run_mpi(job: Job, threads: int, output: "Output", forward: "Stopping") -> Outcome:
    """Let mpirun start the workers on this host; what they note about failures is in a folder that goes with them."""
    with tempfile.TemporaryDirectory(prefix="penstock-mpi-") as folder:
        scratch = Path(folder)
        command = _command(replace(job, where="shared memory"), 0)
        launcher = plan_local_mpirun(job.workers, scratch, find_mpirun(run_command), command, _meeting(threads))
        report = partial(first_failure, scratch / FAILURES)
        outcome = run_workers([launcher], rank_output(output), PATIENCE_SECONDS, report=report, forward=forward)
        code, rank = report() or (outcome.exit_code, None)
        return replace(outcome, exit_code=code, failed_rank=rank)


def _meeting(threads: int) -> dict[str, str]:
    """Return where workers of one machine form their group: at a port that is free now."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    return {**meeting, "OMP_NUM_THREADS": str(threads)}


def _settings(environment: Mapping[str, object]) -> list[str]:
    return [f"{name}={value}" for name, value in environment.items()]


@contextmanager
def _wishes() -> Iterator[Wish]:
    """Take Ctrl-C and SIGTERM as wishes inside the block."""
    before = {number: signal.getsignal(number) for number in WISHES}
    wish = Wish().listen()
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stopping:
    """Tells the launcher which signal the workers are to get: the first wish asks them, the second ends them.

    mpirun is ended by a signal that it can see: it must end its ranks.
    """

    def __init__(self, wish: Wish, last: signal.Signals = signal.SIGKILL) -> None:
        self._wish, self._last, self._passed_on = wish, last, 0

    def __call__(self) -> int | None:
        """Return a signal for every wish that has not been passed on."""
        if self._wish.made <= self._passed_on:
            return None
        self._passed_on += 1
        return STOP if self._passed_on == 1 else self._last


class Output:
    """Takes the workers' lines: events of rank 0 go on, failures and the last talk of every rank are kept."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._said: dict[int, deque[str]] = {}
        self._failures: list[tuple[int, Event]] = []
        self.finished = False

    def __call__(self, rank: int, stream: str, line: str) -> None:
        """Take one line."""
        event = event_from_line(line)
        if event is None:
            self._said.setdefault(rank, deque(maxlen=KEPT_LINES)).append(line.rstrip())
        elif event.kind == "failed":
            self._failures.append((rank, event))
        else:
            self.finished = event.kind == "done"
            self._tell(event)

    def complaint(self, outcome: Outcome) -> str:
        """Return one line that names the rank which failed first, and why."""
        causes = [(rank, event) for rank, event in self._failures if not event.values["follows"]]
        if causes:
            rank, event = causes[0]
            return f"rank {rank} failed: {event.values['message']}; the other workers were ended"
        rank = outcome.failed_rank if outcome.failed_rank is not None else 0
        code = outcome.exit_code
        if code > 128:
            name = signal.Signals(code - 128).name
            return f"rank {rank} was ended by {name}; the other workers were ended too"
        return f"rank {rank} ended with exit code {code}: {_last(self._said.get(rank, ()))}"


def _last(lines: Sequence[str] | deque[str]) -> str:
    said = [line for line in lines if line.strip()]
    return said[-1].strip() if said else "it printed nothing"
