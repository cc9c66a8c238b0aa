"""Starts the workers of a job on this machine, hands their events on, and says in one line why a job failed."""

import json
import signal
import socket
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.cluster.emulate import emulated_cluster
from penstock.cluster.launch import Outcome, run_workers
from penstock.cluster.links import NIC
from penstock.cluster.workers import Worker
from penstock.errors import WorkerError
from penstock.train.events import Event, Tell, event_from_line
from penstock.train.job import Job
from penstock.train.stopping import STOP, WISHES, Wish

MODULE = "penstock.train.worker"
KEPT_LINES = 40  # of each rank's talk
PATIENCE_SECONDS = 10.0  # for other ranks to notice that one failed


def run_job(job: Job, rate: str, threads: int, tell: Tell) -> bool:
    """Run the job to its end and return True, or False where somebody stopped it; raise `WorkerError` on failure.

    With `rate`, each worker is on an emulated host of its own; without, they are processes that talk over loopback.
    A first Ctrl-C lets the workers finish their step and save; a second ends them.
    """
    output = Output(tell)
    with _wishes() as wish:
        stopping = Stopping(wish)
        if rate:
            with emulated_cluster(job.workers, rate) as cluster:
                outcome = cluster.run(
                    _command(job.on(f"emulated hosts, {rate}", NIC), 0),
                    environment={"OMP_NUM_THREADS": str(threads)},
                    sink=output,
                    grace_seconds=PATIENCE_SECONDS,
                    forward=stopping,
                )
        else:
            outcome = run_workers(_on_loopback(job, threads), output, PATIENCE_SECONDS, forward=stopping)
    if outcome.exit_code and not wish.made:
        raise WorkerError(output.complaint(outcome))
    return output.finished


def _command(job: Job, local_rank: int) -> list[str]:
    return [sys.executable, "-m", MODULE, json.dumps(job.document()), str(local_rank), str(job.workers)]


def _on_loopback(job: Job, threads: int) -> list[Worker]:
    """Return the workers with torchrun's environment; they meet at a port that is free now."""
    common = {
        "WORLD_SIZE": job.workers,
        "LOCAL_WORLD_SIZE": job.workers,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": _free_port(),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": threads,
    }
    return [
        Worker(rank, ("env", *_settings({**common, "RANK": rank, "LOCAL_RANK": rank}), *_command(job, rank)))
        for rank in range(job.workers)
    ]


def _settings(environment: dict[str, object]) -> Iterator[str]:
    return (f"{name}={value}" for name, value in environment.items())


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


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
    """Tells the launcher which signal the workers are to get: the first wish asks them, the second ends them."""

    def __init__(self, wish: Wish) -> None:
        self._wish, self._passed_on = wish, 0

    def __call__(self) -> int | None:
        """Return a signal for every wish that has not been passed on."""
        if self._wish.made <= self._passed_on:
            return None
        self._passed_on += 1
        return STOP if self._passed_on == 1 else signal.SIGKILL


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
