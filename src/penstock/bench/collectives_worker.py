"""One rank of `penstock bench collectives`: times every case and lets rank 0 print what all ranks agree on.

All ranks are on one machine and share its clock: a sample lasts from the first rank's start to the last rank's end,
just after a barrier. Cases take turns, so that what slows the machine for a while slows all of them. A round of turns
starts when nobody else uses the machine, and is measured again if somebody did meanwhile; when patience ends the least
disturbed rounds count, and the rows say how disturbed they were.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

import numpy as np

from penstock.bench.jobs import report
from penstock.bench.quiet import busy_share, process_seconds, processors, seconds_of_others
from penstock.bench.stream import latency_seconds, stream_network
from penstock.errors import FitError
from penstock.network import network_document
from penstock.runtime.communicator import Communicator
from penstock.runtime.connect import connected
from penstock.runtime.transport import Array, Transport

QUIET = 0.05  # of all processors' time: others may use so much during a round
_ROUND_NBYTES, _MOST_TURNS = 8_000_000, 40  # turns are repeated within a round until they moved about this much
_LOOK_SECONDS, _PAUSE_SECONDS = 0.2, 1.0  # at the machine before a round; between two looks


@dataclass(frozen=True, slots=True)
class Job:
    """What the ranks are asked to measure."""

    engine: str
    sizes: tuple[int, ...]  # bytes
    cases: tuple[tuple[str, str], ...]  # operation, strategy
    rounds: int  # per size
    measure: bool  # alpha, beta, gamma and latency too
    patience_seconds: float  # for the machine to be quiet, in all


def main() -> None:
    """Measure the job given as JSON on the command line."""
    document = json.loads(sys.argv[1])
    document["cases"] = tuple(tuple(case) for case in document["cases"])
    job = Job(**document)
    with connected(job.engine) as transport, _with_blocking_native(transport, job.engine) as at_its_best:
        communicator = Communicator(at_its_best, timeout_seconds=60.0)
        patience = wait_until_idle(communicator, job.patience_seconds)
        report(transport.rank, {"network": _measured(transport, job)})
        for nbytes in job.sizes:
            rounds, patience = _rounds(communicator, job, nbytes, patience)
            for index, (operation, strategy) in enumerate(job.cases):
                times = [round(float(time), 7) for one in rounds for time in one.times[:, index]]
                row = {"operation": operation, "strategy": strategy, "nbytes": nbytes, "times": times}
                report(transport.rank, {**row, "others": max(one.others for one in rounds)})


def _measured(transport: Transport, job: Job) -> dict[str, Any] | None:
    """Return the network as a document; None where it was not asked for or too disturbed to fit a line."""
    if not job.measure:
        return None
    try:
        network = stream_network(transport, job.engine)
    except FitError:  # on all ranks alike: they agree on every time
        return None
    return {**network_document(network), "latency_seconds": latency_seconds(transport)}


@contextmanager
def _with_blocking_native(transport: Transport, engine: str) -> Iterator[Transport]:
    """Give an engine whose own collectives are at their best: Open MPI's blocking ones are."""
    if engine != "mpi":
        yield transport
        return
    from penstock.runtime.transport.mpi import MpiTransport

    blocking = MpiTransport(blocking_native=True)
    yield blocking
    blocking.close()


@dataclass(frozen=True, slots=True)
class _Round:
    times: Array  # (turns, cases)
    others: float  # share of the machine that others used


def _rounds(communicator: Communicator, job: Job, nbytes: int, patience: float) -> tuple[list[_Round], float]:
    """Return the quietest rounds, and the patience left."""
    data = np.zeros(nbytes // 4, np.float32)
    for operation, strategy in job.cases:
        _check(communicator, operation, strategy, data)
    rounds: list[_Round] = []
    while sum(one.others < QUIET for one in rounds) < job.rounds:
        if patience <= 0 and len(rounds) >= job.rounds:
            break
        patience = wait_until_idle(communicator, patience)
        start = monotonic()
        rounds.append(_round(communicator, job.cases, data))
        if rounds[-1].others >= QUIET:
            patience -= monotonic() - start
        patience = float(gather(communicator, np.array([patience]))[0, 0])  # rank 0's: all must decide alike
    return sorted(rounds, key=lambda one: one.others)[: job.rounds], patience


def _round(communicator: Communicator, cases: tuple[tuple[str, str], ...], data: Array) -> _Round:
    turns = min(max(1, _ROUND_NBYTES // data.nbytes), _MOST_TURNS)
    moments = np.zeros((2, turns, len(cases)))  # starts, ends
    ours = {int(process) for process in gather(communicator, np.array([float(os.getpid())])).flat}
    began, before = monotonic(), process_seconds()
    for turn in range(turns):
        for place in range(len(cases)):
            index = (place + turn) % len(cases)
            operation, strategy = cases[index]
            barrier(communicator)
            moments[0, turn, index] = monotonic()
            getattr(communicator, operation)(data, strategy=strategy)
            moments[1, turn, index] = monotonic()
    used = seconds_of_others(before, process_seconds(), ours) / (monotonic() - began) / processors()
    everyone = gather(communicator, moments)
    others = float(gather(communicator, np.array([used]))[0, 0])  # rank 0's look: all must decide alike
    return _Round(everyone[:, 1].max(axis=0) - everyone[:, 0].min(axis=0), others)


def _check(communicator: Communicator, operation: str, strategy: str, data: Array) -> None:
    """Run a case once, untimed, and look at its result: a fast wrong answer is not worth timing."""
    rank, world_size = communicator.transport.rank, communicator.transport.world_size
    data[:] = rank + 1
    getattr(communicator, operation)(data, strategy=strategy)
    wanted = 1 if operation == "broadcast" else world_size * (world_size + 1) // 2
    assert (operation == "reduce" and rank != 0) or np.all(data == wanted), f"{operation} by {strategy} is wrong"
    data[:] = 0


def barrier(communicator: Communicator) -> None:
    """Return when all ranks are here; twice, because the first may find some of them asleep."""
    for _ in range(2):
        communicator.all_reduce(np.zeros(1), strategy="native")


def wait_until_idle(communicator: Communicator, patience: float) -> float:
    """Let all ranks sleep until nobody else uses the machine; return the patience left.

    Rank 0 looks and decides for all: a rank that went on would keep the machine busy while another still waits.
    """
    while True:
        barrier(communicator)
        first = communicator.transport.rank == 0
        share = busy_share(_LOOK_SECONDS if first else 1.2 * _LOOK_SECONDS)  # nobody wakes up while rank 0 looks
        if gather(communicator, np.array([share]))[0, 0] < QUIET or patience <= 0:
            return patience
        sleep(_PAUSE_SECONDS)
        patience -= _PAUSE_SECONDS + _LOOK_SECONDS


def gather(communicator: Communicator, values: Array) -> Array:
    """Return all ranks' values, by rank."""
    everyone = np.zeros((communicator.transport.world_size, *values.shape))
    everyone[communicator.transport.rank] = values
    communicator.all_reduce(everyone, strategy="native")
    return everyone


if __name__ == "__main__":
    main()
