"""gTop-k's Table VII replayed on emulated hosts, for `penstock reproduce gtop-k --record`.

An iteration is the paper's: computing, then compressing, then communicating, nothing overlapped. Computing and
compressing are waiting, as long as the paper's GPU took (Table VI, Fig. 11); gradients and blocks travel. Alpha, beta
and gamma of the hosts are measured first, in the same run: the paper's equations stand beside with them.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import sleep
from typing import Annotated, Any

import numpy as np
import typer

from penstock.bench.jobs import Place, report, run_job
from penstock.bench.record import make_record, save_record
from penstock.bench.stream import stream_network
from penstock.cli.options import JsonOption, RecordOption
from penstock.cli.output import print_json, print_table
from penstock.codecs.sparse.sparse_codec import SparseCodec
from penstock.errors import ClusterError
from penstock.network import network_document
from penstock.reproduce.gtop_k import DENSITY, MODELS
from penstock.runtime.communicator import Communicator
from penstock.runtime.connect import connected
from sparse_worker import DENSE, Preselected, timed
from study import RANK, start

WORKER = (__file__, RANK)
_TIMEOUT_SECONDS = 900.0
_CONSTANTS = ("alpha_seconds", "beta_seconds_per_byte", "gamma_seconds_per_byte")
METHODS = ("topk_allgather", "gtopk", "gtopk_doubling", DENSE)


@dataclass(frozen=True, slots=True)
class Case:
    """One model of the table."""

    model: str
    numel: int
    compute_seconds: float
    compress_seconds: float


def replay_cases() -> None:
    """Replay the cases given as JSON on the command line, as one rank."""
    document: dict[str, Any] = json.loads(sys.argv[-1])
    with connected(document["engine"]) as transport:
        communicator = Communicator(transport, timeout_seconds=100.0)
        network = network_document(stream_network(transport, document["engine"]))
        report(transport.rank, {"network": {name: network[name] for name in _CONSTANTS}})
        for case in document["cases"]:
            _replay(communicator, Case(**case), document["density"], document["iterations"])


def _replay(communicator: Communicator, case: Case, density: float, iterations: int) -> None:
    data, residual = np.zeros(case.numel, np.float32), np.zeros(case.numel, np.float32)
    codec = Preselected(SparseCodec(density, index_form="int32"), case.numel, communicator.transport.rank)

    def iterate(method: str) -> None:
        sleep(case.compute_seconds)
        if method == DENSE:
            communicator.all_reduce(data, DENSE)
        else:
            sleep(case.compress_seconds)
            communicator.all_reduce(data, method, codec, residual)

    times: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(iterations + 1):  # in turns, so that a slow moment of the machine falls on all of them
        for method in METHODS:
            times[method].append(timed(communicator, lambda m=method: iterate(m)))
    for method, found in times.items():
        report(communicator.transport.rank, {"model": case.model, "method": method, "times": found[1:]})


def cases(names: Sequence[str]) -> list[Case]:
    """Return the models of the table, by name."""
    known = {model.name: model for model in MODELS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ClusterError(f"no model {unknown[0]!r} in Table VII; it has {', '.join(known)}")
    chosen = [known[name] for name in names]
    return [Case(model.name, model.parameters, model.compute_seconds, model.compress_seconds) for model in chosen]


def replayed_rows(place: Place, models: Sequence[Case], engine: str, iterations: int) -> Iterator[dict[str, Any]]:
    """Replay the models on all hosts; yield a row for each model and method."""
    job = {
        "engine": engine,
        "density": DENSITY,
        "iterations": iterations,
        "cases": [asdict(model) for model in models],
    }
    measured, *others = run_job(place, WORKER, job, lambda _: None, _TIMEOUT_SECONDS, engine=engine)
    for document in others:
        times = document.pop("times")
        where = {"hosts": place.hosts, "rate": place.rate, "engine": engine, "links": place.links}
        spread = {"spread": max(times) - min(times), "samples": len(times)}
        yield {**where, **document, "seconds": median(times), **spread, **measured["network"]}


def gtop_k(
    hosts: Annotated[int, typer.Option(help="emulated hosts", min=1)] = 16,
    rate: Annotated[str, typer.Option(help="of each NIC, such as 1gbit")] = "1gbit",
    links: Annotated[str, typer.Option(help="smooth; or coarse, which take less processor time")] = "coarse",
    engine: Annotated[str, typer.Option(help="gloo or mpi")] = "gloo",
    models: Annotated[str, typer.Option(help="rows of the table")] = "VGG-16,ResNet-20,AlexNet,ResNet-50",
    iterations: Annotated[int, typer.Option(help="of every method, after one to warm up", min=1)] = 5,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Replay iterations of Table VII: real communication, computing and compressing by waiting. Needs root."""
    chosen = cases([part.strip() for part in models.split(",")])
    rows = list(replayed_rows(Place(hosts, rate, links), chosen, engine, iterations))
    if out:
        save_record(make_record("gtop-k", rows), out)
    if json:
        print_json(rows)
        return
    table = [(row["model"], row["method"], round(row["seconds"], 4), round(row["spread"], 4)) for row in rows]
    print_table(f"Table VII on {hosts} hosts, seconds", ("model", "method", "iteration", "spread"), table)


if __name__ == "__main__":
    start(gtop_k, replay_cases)
