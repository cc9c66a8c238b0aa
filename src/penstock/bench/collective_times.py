"""Our collectives beside the engine's own, on emulated hosts or on loopback: `penstock bench collectives`.

Every row has the least time any program could take at the link's rate (`floor_seconds`), and ours what the simulator
predicts from alpha, beta and gamma as measured in the same run (`predicted_seconds`, see `bench/stream.py`).

All ranks are on one machine and share its clock: a sample lasts from the first rank's start to the last rank's end,
just after a barrier. Cases take turns, so that what slows the machine for a while slows all of them. A round of turns
starts when no other process uses the machine, and is measured again if one did meanwhile; when patience ends the least
disturbed rounds count, and the rows say how disturbed they were. Run as a program, this file is one rank.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from time import monotonic
from typing import Any

import numpy as np

from penstock.bench.jobs import LOOPBACK, Place, report, run_job
from penstock.bench.quiet import QUIET, barrier, gather, process_seconds, processors, seconds_of_others, wait_until_idle
from penstock.bench.stream import latency_seconds, stream_network
from penstock.cluster.topology import parse_rate
from penstock.errors import FitError
from penstock.network import Network, network_document
from penstock.program import Collective
from penstock.runtime.communicator import Communicator
from penstock.runtime.connect import connected
from penstock.runtime.transport import Array, Transport
from penstock.simulator.program import simulate_program
from penstock.strategies import build
from penstock.verify.summary import least_nic_elements

WORKER = ("-m", "penstock.bench.collective_times")
CASES = (
    ("all_reduce", "native"),
    ("all_reduce", "ring"),
    ("all_reduce", "linear_pipeline"),
    ("broadcast", "native"),
    ("broadcast", "linear_pipeline"),
    ("broadcast", "spanning_tree"),
    ("reduce", "native"),
    ("reduce", "linear_pipeline"),
)
IMPLEMENTATION = {"gloo": "gloo", "mpi": "openmpi"}  # whose the engine's own collectives are
_NUMBERS = ("alpha_seconds", "beta_seconds_per_byte", "gamma_seconds_per_byte")  # as measured in the same run
_TIMEOUT_SECONDS = 600.0
_ROUND_NBYTES, _MOST_TURNS = 8_000_000, 40  # turns are repeated within a round until they moved about this much


@dataclass(frozen=True, slots=True)
class CollectivesJob:
    """What the ranks are asked to measure."""

    engine: str
    sizes: tuple[int, ...]  # bytes
    cases: tuple[tuple[str, str], ...]  # operation, strategy
    rounds: int  # per size
    measure: bool  # alpha, beta, gamma and latency too
    patience_seconds: float  # for the machine to be quiet, in all


def collective_rows(place: Place, job: CollectivesJob) -> Iterator[dict[str, Any]]:
    """Run a job on all hosts and yield its rows."""
    measured: dict[str, Any] | None = None
    for document in run_job(place, WORKER, asdict(job), lambda _: None, _TIMEOUT_SECONDS, engine=job.engine):
        if "network" in document:
            measured = document["network"]
        else:
            yield {**_row(place, job.engine, document, measured), "links": place.links}


def _row(place: Place, engine: str, document: dict[str, Any], measured: dict[str, Any] | None) -> dict[str, Any]:
    operation, strategy, nbytes, times = (document[key] for key in ("operation", "strategy", "nbytes", "times"))
    native = strategy == "native"
    predicted = None
    if measured and not native:
        predicted = predicted_seconds(place, operation, strategy, nbytes, _network(measured))
    return {
        "hosts": place.hosts,
        "rate": place.rate,
        "engine": engine,
        "operation": operation,
        "strategy": strategy,
        "implementation": IMPLEMENTATION[engine] if native else "penstock",
        "nbytes": nbytes,
        "seconds": median(times),
        "spread": max(times) - min(times),
        "samples": len(times),
        "others": document["others"],  # share of this machine's processors that others used at the time
        "floor_seconds": floor_seconds(place, operation, nbytes),
        "predicted_seconds": predicted,
        **{name: measured and measured[name] for name in (*_NUMBERS, "latency_seconds")},
    }


def _network(measured: dict[str, Any]) -> Network:
    return Network(workers=measured["workers"], name=measured["name"], **{name: measured[name] for name in _NUMBERS})


def floor_seconds(place: Place, operation: str, nbytes: int) -> float | None:
    """Return what the busiest NIC must move, whatever the program, over its rate; None where no rate is set."""
    bits_per_second = None if place.rate == LOOPBACK else parse_rate(place.rate)
    if bits_per_second is None:
        return None
    return least_nic_elements(Collective(operation), place.hosts, nbytes) * 8 / bits_per_second


def predicted_seconds(place: Place, operation: str, strategy: str, nbytes: int, network: Network) -> float:
    """Return the simulator's time for the same program on the network as measured."""
    return simulate_program(build(operation, strategy, place.hosts, nbytes // 4), network).seconds


def main() -> None:
    """Measure the job given as JSON on the command line, as one rank."""
    document = json.loads(sys.argv[-1])
    document["cases"] = tuple(tuple(case) for case in document["cases"])
    job = CollectivesJob(**document)
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


def _measured(transport: Transport, job: CollectivesJob) -> dict[str, Any] | None:
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


def _rounds(
    communicator: Communicator, job: CollectivesJob, nbytes: int, patience: float
) -> tuple[list[_Round], float]:
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


if __name__ == "__main__":
    main()
