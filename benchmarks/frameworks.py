"""Does a framework's adaptor beat the framework's own all-reduce, and what does it add to the bare exchange?

Every method trains the same model on emulated hosts, in processes of its own; methods take turns. `own` is the
framework's own data parallelism (TensorFlow: MultiWorkerMirroredStrategy by ring; JAX: `jax.lax.pmean`; MXNet: its
parameter server, `dist_sync`), `none` trains without communication. `apart-X` is the same work as X, done one after the
other without an adaptor: the framework computes, the bare exchange averages as many values that lie in its memory, the
framework applies its own. `hand-X` averages the gradients themselves, as a script would without an adaptor: they are
copied into the exchange's memory, and applied from there. `bare-X` is that exchange alone. All run in the processes of
X, in turns with it, and ranks begin each step together. Of each iteration the slowest rank's clock counts, and the
processor time that a rank takes on average.

MXNet has an environment of its own (`make test-mxnet` makes it) and travels by MPI:
`.venv-mxnet/bin/python benchmarks/frameworks.py --frameworks mxnet`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from frameworks_worker import FrameworkJob
from penstock.bench.jobs import Done, Place, run_job
from penstock.bench.record import make_record, save_record
from penstock.cli.options import JsonOption, RecordOption
from penstock.cli.output import print_json, print_table, progress
from study import Claim, claim_documents, print_claims, start

ENGINES = {"mxnet": "mpi"}  # others: gloo
WORKER = (str(Path(__file__).with_name("frameworks_worker.py")),)
METHODS = ("none", "own", "dense", "onebit")
WANTED, MOST = 1.8, 1.05  # times as fast as the framework's own; of computing and the bare exchange together
BESIDE = {"apart": "the bare exchange", "hand": "an exchange by hand"}
_TIMEOUT_SECONDS = 280.0
Row = Mapping[str, Any]


def framework_rows(
    frameworks: Sequence[str], methods: Sequence[str], place: Place, rounds: int, iterations: int, done: Done
) -> Iterator[dict[str, Any]]:
    """Yield a row for every framework and method: medians over all iterations of all rounds."""
    for framework in frameworks:
        found: dict[str, list[dict[str, Any]]] = {}
        for _ in range(rounds):
            for method in methods:
                job = asdict(FrameworkJob(framework, method, iterations))
                engine = ENGINES.get(framework, "gloo")
                for result in run_job(place, WORKER, job, done, _TIMEOUT_SECONDS, engine=engine):
                    found.setdefault(result["method"], []).append(result)
                done(f"{framework} {method}")
        for method, results in found.items():
            yield _row(framework, place, method, results)


def _row(framework: str, place: Place, method: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    seconds = [each for result in results for each in result["seconds"]]
    return {
        "framework": framework,
        "hosts": place.hosts,
        "rate": place.rate,
        "parameters": results[0]["parameters"],
        "method": method,
        "iteration_seconds": median(seconds),
        "spread_seconds": max(seconds) - min(seconds),
        "cpu_seconds": median(each for result in results for each in result["cpu_seconds"]),
        "samples": len(seconds),
        "sent_nbytes": results[0]["sent_nbytes"],
        "routes": results[0]["routes"],
    }


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Return what is asked of an adaptor."""
    found = []
    for framework in dict.fromkeys(row["framework"] for row in rows):
        taken = {row["method"]: row["iteration_seconds"] for row in rows if row["framework"] == framework}
        if {"own", "onebit"} <= set(taken):
            text = f"{framework}: onebit, times as fast as the framework's own all-reduce"
            found.append(Claim(text, taken["own"] / taken["onebit"], WANTED))
        for method in ("dense", "onebit"):
            for beside, words in BESIDE.items():
                if {method, f"{beside}-{method}"} <= set(taken):
                    text = f"{framework}: {method}, over computing first and {words} then"
                    found.append(Claim(text, taken[method] / taken[f"{beside}-{method}"], MOST, at_most=True))
    return found


def frameworks(
    names: Annotated[str, typer.Option("--frameworks", help="tensorflow, jax; or mxnet")] = "tensorflow,jax",
    methods: Annotated[str, typer.Option(help="ways of training")] = ",".join(METHODS),
    hosts: Annotated[int, typer.Option(help="emulated", min=2)] = 4,
    rate: Annotated[str, typer.Option(help="of each host's NIC")] = "1gbit",
    rounds: Annotated[int, typer.Option(help="starts of each method", min=1)] = 4,
    iterations: Annotated[int, typer.Option(help="measured in each start", min=1)] = 16,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Train a model of 12M parameters by every method on emulated hosts, and compare. Needs root."""
    wanted, ways = names.split(","), methods.split(",")
    with progress("frameworks", len(wanted) * len(ways) * rounds) as done:
        rows = list(framework_rows(wanted, ways, Place(hosts, rate), rounds, iterations, done))
    answers = claim_documents(claims(rows))
    if out:
        save_record(make_record("frameworks", rows, claims=answers), out)
    if json:
        print_json({"rows": rows, "claims": answers})
        return
    print_table(
        "iterations on emulated hosts, ms",
        ("framework", "method", "iteration", "spread", "cores", "sent MB"),
        [
            (
                row["framework"],
                row["method"],
                f"{1e3 * row['iteration_seconds']:.1f}",
                f"{1e3 * row['spread_seconds']:.1f}",
                f"{1e3 * row['cpu_seconds']:.1f}",
                f"{row['sent_nbytes'] / 1e6:.2f}",
            )
            for row in rows
        ],
    )
    print_claims(answers)


if __name__ == "__main__":
    start(frameworks)
