"""Starts the workers of a job on this machine, hands their events on, and says in one line why a job failed.

Engine gloo: we start them, as torchrun would. Engine mpi: mpirun does, and they form a gloo group as well, which torch
needs beside MPI.
"""

import json
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from penstock.cluster.building import NIC, run_command
from penstock.cluster.emulate import emulated_cluster
from penstock.cluster.processes import Outcome, run_workers
from penstock.cluster.worker_commands import (
    find_mpirun,
    loopback_meeting,
    loopback_workers,
    plan_local_mpirun,
    run_mpirun,
)
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
            commands = [_command(job, rank) for rank in range(job.workers)]
            workers = loopback_workers(commands, {"OMP_NUM_THREADS": str(threads)})
            outcome = run_workers(workers, output, PATIENCE_SECONDS, forward=stopping)
    if outcome.exit_code and not wish.made:
        raise WorkerError(output.complaint(outcome))
    return output.finished


def _command(job: Job, local_rank: int) -> list[str]:
    return [sys.executable, "-m", MODULE, json.dumps(job.document()), str(local_rank), str(job.workers)]


def _run_mpi(job: Job, threads: int, output: "Output", forward: "Stopping") -> Outcome:
    """Let mpirun start the workers on this host; what they note about failures is in a folder that goes with them."""
    with tempfile.TemporaryDirectory(prefix="penstock-mpi-") as folder:
        scratch = Path(folder)
        command = _command(replace(job, where="shared memory"), 0)
        settings = loopback_meeting() | {"OMP_NUM_THREADS": str(threads)}
        launcher = plan_local_mpirun(job.workers, scratch, find_mpirun(run_command), command, settings)
        return run_mpirun(launcher, scratch, output, PATIENCE_SECONDS, forward=forward)


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
        if code - 128 in list(signal.Signals):  # others are exit codes, as 255
            name = signal.Signals(code - 128).name
            return f"rank {rank} was ended by {name}; the other workers were ended too"
        return f"rank {rank} ended with exit code {code}: {_last(self._said.get(rank, ()))}"


def _last(lines: Sequence[str] | deque[str]) -> str:
    said = [line for line in lines if line.strip()]
    return said[-1].strip() if said else "it printed nothing"
