"""Our collectives beside the engine's own, on emulated hosts or on loopback: `penstock bench collectives`.

Every row has the least time any program could take at the link's rate (`floor_seconds`), and ours what the simulator
predicts from alpha, beta and gamma as measured in the same run (`predicted_seconds`, see `bench/stream.py`).
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from penstock.bench.coarse_links import BUCKETS
from penstock.bench.collectives_worker import Job
from penstock.bench.jobs import Output, Place
from penstock.cluster.emulate import emulated_cluster
from penstock.cluster.launch import Outcome, Sink, run_workers
from penstock.cluster.mpi import find_mpirun
from penstock.cluster.ports import free_port
from penstock.cluster.rates import parse_rate
from penstock.cluster.tools import run_command
from penstock.cluster.workers import Worker
from penstock.errors import ClusterError
from penstock.network import Network
from penstock.program import Collective
from penstock.simulator.program import simulate_program
from penstock.strategies import build
from penstock.verify.summary import least_nic_elements

LOOPBACK = "loopback"  # instead of a rate: this machine's own, without emulated hosts
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


def collective_rows(place: Place, job: Job, links: str = "smooth") -> Iterator[dict[str, Any]]:
    """Run a job on all hosts and yield its rows; `links` are `smooth` or, for many hosts on few cores, `coarse`."""
    if links not in BUCKETS:
        raise ClusterError(f"links {links!r}; wanted {' or '.join(BUCKETS)}")
    output = Output(lambda _: None)
    outcome = _run(place, job, links, output)
    if outcome.exit_code != 0:
        raise ClusterError(output.complaint(outcome.failed_rank, outcome.exit_code))
    measured: dict[str, Any] | None = None
    for document in output.results:
        if "network" in document:
            measured = document["network"]
        else:
            yield {**_row(place, job.engine, document, measured), "links": links}


def _run(place: Place, job: Job, links: str, sink: Sink) -> Outcome:
    command = [sys.executable, "-m", "penstock.bench.collectives_worker", json.dumps(asdict(job))]
    if place.rate == LOOPBACK:
        return run_workers(_LOOPBACK[job.engine](place.hosts, command), sink, timeout_seconds=_TIMEOUT_SECONDS)
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with emulated_cluster(place.hosts, place.rate, bucket=BUCKETS[links]) as cluster:
        return cluster.run(
            command, engine=job.engine, environment=environment, sink=sink, timeout_seconds=_TIMEOUT_SECONDS
        )


def _gloo_workers(hosts: int, command: Sequence[str]) -> list[Worker]:
    meeting = ["MASTER_ADDR=127.0.0.1", f"MASTER_PORT={free_port()}"]  # so that two benchmarks can run at once
    common = ["env", *meeting, "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1"]
    return [Worker(rank, (*common, f"RANK={rank}", f"WORLD_SIZE={hosts}", *command)) for rank in range(hosts)]


def _mpi_workers(hosts: int, command: Sequence[str]) -> list[Worker]:
    launch = [find_mpirun(run_command), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(hosts)]
    return [Worker(0, (*launch, *command))]


_LOOPBACK: dict[str, Callable[[int, Sequence[str]], list[Worker]]] = {"gloo": _gloo_workers, "mpi": _mpi_workers}


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
