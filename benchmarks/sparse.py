"""Sparse all-reduces on emulated hosts: global top-k, top-k and the dense ring, beside the model.

Every row has two predictions. `predicted_seconds` adds up the steps of the program, each as long as so many messages
and merges at once took in the same run (`rounds.py`): emulated hosts share processors. `alpha_beta_seconds` is what the
simulator says for hosts that share nothing: alpha and beta of messages in a stream, merges as on one core.
`floor_seconds` is the bytes that stand one after the other at the NIC's rate.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from penstock.bench.jobs import Place, run_job
from penstock.bench.record import make_record, save_record
from penstock.cli.bench_collectives import parse_engines
from penstock.cli.options import JsonOption, RecordOption, parse_counts
from penstock.cli.output import print_json, print_table
from penstock.cluster.topology import parse_rates
from penstock.codecs.sparse.sparse_codec import SparseCodec
from penstock.errors import ClusterError, PenstockError
from penstock.network import Network
from penstock.program import Op
from penstock.runtime.transport import ring_nbytes
from penstock.simulator.program import CodecCost, simulate_program
from penstock.strategies import build, find_strategy
from rounds import rounds_from
from sparse_worker import DENSE, SparseJob, random_block
from study import Claim, claim_documents, print_claims, start

STRATEGIES = ("topk_allgather", "gtopk", "gtopk_doubling")
MERGES = ("computed", "waited")
_NUMBERS = ("alpha_seconds", "beta_seconds_per_byte", "gamma_seconds_per_byte")
_TIMEOUT_SECONDS = 400.0
WORKER = (str(Path(__file__).with_name("sparse_worker.py")),)
Row = Mapping[str, Any]
_BANDWIDTH = 4  # a message whose bytes take so many times its startup is bound by bandwidth
Table = Mapping[tuple[Any, ...], Row]
_TIMES = ("seconds", "spread", "floor_seconds", "messages_seconds", "merges_seconds", "predicted_seconds")


def sparse_rows(place: Place, job: SparseJob) -> Iterator[dict[str, Any]]:
    """Run a job on all hosts and yield its rows."""
    if job.merges not in MERGES:
        raise ClusterError(f"merges {job.merges!r}; wanted {' or '.join(MERGES)}")
    first, *others = run_job(place, WORKER, asdict(job), lambda _: None, _TIMEOUT_SECONDS, engine=job.engine)
    measured, rounds = first["network"], {}
    for document in others:
        if "rounds" in document:
            rounds = document
        else:
            yield {**_row(place, job, document, measured, rounds), "links": place.links}


def _row(
    place: Place, job: SparseJob, document: dict[str, Any], measured: dict[str, Any], rounds: dict[str, Any]
) -> dict[str, Any]:
    density, times, strategy = document["density"], document["times"], document["strategy"]
    merge_seconds = 0.0 if density is None else job.merge_seconds[job.densities.index(density)]
    network = Network(workers=place.hosts, **{name: measured[name] for name in _NUMBERS})
    nbytes, block = 4 * job.numel, document["block_nbytes"]
    shared_nothing = alpha_beta_seconds(strategy, place.hosts, nbytes, block, merge_seconds, network)
    steps = {} if density is None else _steps(strategy, place.hosts, rounds)
    predicted = steps.get("predicted_seconds", shared_nothing)
    return {
        "hosts": place.hosts,
        "rate": place.rate,
        "engine": job.engine,
        "density": density,
        "strategy": strategy,
        "merges": None if density is None else job.merges,
        "seconds": median(times),
        "spread": max(times) - min(times),
        "samples": len(times),
        "predicted_seconds": predicted,
        "error": predicted / median(times) - 1,
        "alpha_beta_seconds": shared_nothing,
        "floor_seconds": floor_seconds(strategy, place, nbytes, block),
        **{name: steps.get(name) for name in ("messages_seconds", "merges_seconds", "start_seconds", "rounds")},
        "nbytes": nbytes,
        "block_nbytes": block,
        "merge_seconds": merge_seconds,
        "others": document["others"],  # share of this machine's processors that others used at the time
        **{name: measured[name] for name in (*_NUMBERS, "latency_seconds")},
    }


def _steps(strategy: str, hosts: int, document: dict[str, Any]) -> dict[str, Any]:
    """Return the prediction from the steps of the program, and what it is made of."""
    start = document["start_seconds"]
    messages, merges = rounds_from(document["rounds"]).seconds(strategy, hosts)
    parts = {"messages_seconds": messages, "merges_seconds": merges, "start_seconds": start}
    return {"predicted_seconds": sum(parts.values()), **parts, "rounds": document["rounds"]}


def floor_seconds(strategy: str, place: Place, nbytes: int, block_nbytes: int | None) -> float | None:
    """Return the bytes that stand one after the other, at the slowest NIC's rate; None where none has a limit."""
    limits = [rate for rate in parse_rates(place.rate, place.hosts) if rate is not None]
    if not limits:
        return None
    rate = min(limits)
    if block_nbytes is None:
        return 8 * ring_nbytes(nbytes, place.hosts) / rate
    steps = find_strategy(strategy).steps
    assert steps is not None
    return 8 * block_nbytes * steps(place.hosts).messages / rate


def alpha_beta_seconds(
    strategy: str, hosts: int, nbytes: int, block_nbytes: int | None, merge_seconds: float, network: Network
) -> float:
    """Return the simulator's time for a gradient of `nbytes`, hosts sharing nothing; without a block, the ring's."""
    if block_nbytes is None:
        return simulate_program(build("all_reduce", DENSE, hosts, nbytes // 4), network).seconds
    cost = CodecCost(block_nbytes / nbytes, lambda op, _: merge_seconds if op is Op.MERGE else 0.0)
    if strategy == "topk_allgather":  # its merges write into the gradient, which is not timed
        network = Network(network.workers, network.alpha_seconds, network.beta_seconds_per_byte, 0.0)
    return simulate_program(build("all_reduce", strategy, hosts, 1), network, nbytes, codec=cost).seconds


def local_seconds(numel: int, densities: Sequence[float], index_form: str) -> list[dict[str, float]]:
    """Return what one rank does by itself, on this process's core: select, merge, write into the gradient."""
    gradient = np.random.default_rng(0).standard_normal(numel, np.float32)
    return [_local(SparseCodec(density, index_form=index_form), gradient) for density in densities]


def _local(codec: SparseCodec, gradient: NDArray[np.float32]) -> dict[str, float]:
    residual, result = np.zeros_like(gradient), np.zeros_like(gradient)
    one, other = (random_block(codec, gradient.size, seed) for seed in range(2))
    block, merged = one.copy(), one.copy()
    return {
        "density": codec.density,
        "encode_seconds": _best(lambda: codec.encode(gradient, residual, block)),
        "merge_seconds": _best(lambda: codec.merge(other, merged, residual), before=lambda: np.copyto(merged, one)),
        "decode_seconds": _best(lambda: codec.decode(one, result)),
        "decode_add_seconds": _best(lambda: codec.decode_add(one, result)),
    }


def _best(run: Callable[[], Any], before: Callable[[], Any] = lambda: None, repetitions: int = 9) -> float:
    """Return the fastest of a few calls: what a core of its own would take, on a machine that others use too."""
    times = []
    for _ in range(repetitions):
        before()
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return min(times)


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Return every claim the rows can answer."""
    table = {(row["hosts"], row["engine"], row["density"], row["merges"], row["strategy"]): row for row in rows}
    return [*_speed(table), *_crossing(table), *_model(rows)]


def _speed(table: Table) -> Iterator[Claim]:
    """Look at density 0.005: gtopk 1.5x top-k and 15x dense, doubling 1.3x the tree; asked for on 16 hosts."""
    for (hosts, engine, density, merges, strategy), row in table.items():
        if strategy != "gtopk" or density != 0.005:
            continue
        where = f"on {hosts} hosts, {engine}, density {density}, merges {merges}"
        rivals = (
            ("gtopk over top-k", "topk_allgather", merges, density, 1.5),
            ("gtopk over the dense ring", "ring", None, None, 15.0),
        )
        for text, name, how, share, wanted in rivals if hosts == 16 else ():
            other = table.get((hosts, engine, share, how, name))
            if other is not None:
                yield Claim(f"{text}, {where}", other["seconds"] / row["seconds"], wanted)
        doubling = table.get((hosts, engine, density, merges, "gtopk_doubling"))
        if doubling is not None and hosts == 16:
            yield Claim(f"doubling over tree and broadcast, {where}", row["seconds"] / doubling["seconds"], 1.3)


def _crossing(table: Table) -> Iterator[Claim]:
    """Compare which of gtopk and top-k is faster with the prediction; ties within 10% may go either way."""
    for (hosts, engine, density, merges, strategy), row in table.items():
        other = table.get((hosts, engine, density, merges, "topk_allgather"))
        if strategy != "gtopk" or other is None:
            continue
        predicted = other["predicted_seconds"] / row["predicted_seconds"]
        found = other["seconds"] / row["seconds"]
        if abs(predicted - 1) > 0.1:
            faster = "gtopk" if predicted > 1 else "top-k"
            ratio = found if predicted > 1 else 1 / found
            text = f"{faster} is faster as predicted, {hosts} hosts, {engine}, density {density}, merges {merges}"
            yield Claim(text, ratio, 1.0)


def _model(rows: Sequence[Row]) -> Iterator[Claim]:
    """Compare times with the model, within 20%, where the bytes of a message take longer than its startup."""
    for row in rows:
        block = row["block_nbytes"]
        if block is None or row["beta_seconds_per_byte"] * block < _BANDWIDTH * row["alpha_seconds"]:
            continue
        off = max(row["predicted_seconds"] / row["seconds"], row["seconds"] / row["predicted_seconds"]) - 1
        where = f"{row['strategy']}, {row['hosts']} hosts, {row['engine']}, density {row['density']}"
        yield Claim(f"model off, {where}, merges {row['merges']}", off, 0.2, at_most=True)


def sparse(
    hosts: Annotated[str, typer.Option(help="numbers of hosts")] = "4,8,16",
    rate: Annotated[str, typer.Option(help="of each NIC, such as 1gbit")] = "1gbit",
    links: Annotated[str, typer.Option(help="smooth; or coarse, which take less processor time")] = "smooth",
    engine: Annotated[str, typer.Option(help="gloo, mpi, or both")] = "gloo",
    numel: Annotated[int, typer.Option(help="elements of the gradient", min=1000)] = 25_000_000,
    densities: Annotated[str, typer.Option(help="shares of the gradient that are sent")] = "0.001,0.005",
    merges: Annotated[str, typer.Option(help="computed, waited for, or both")] = "waited,computed",
    index_form: Annotated[str, typer.Option(help="int32 (8 bytes per entry), gaps or smaller")] = "int32",
    rounds: Annotated[int, typer.Option(help="of every strategy", min=1)] = 7,
    dense_rounds: Annotated[int, typer.Option(help="of the dense ring; 0: leave it out", min=0)] = 2,
    patience: Annotated[float, typer.Option(help="seconds to wait for a quiet machine, per setting", min=0.0)] = 30.0,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Time sparse all-reduces and the dense ring on emulated hosts. Needs root."""
    shares = _parse_densities(densities)
    local = local_seconds(numel, shares, index_form)
    merge_seconds = tuple(one["merge_seconds"] for one in local)
    rows: list[dict[str, Any]] = []
    for count in parse_counts(hosts, "--hosts"):
        for name in parse_engines(engine):
            for turn, how in enumerate(part.strip() for part in merges.split(",")):
                ring = 0 if turn else dense_rounds  # once is enough: it has no merges of blocks
                job = SparseJob(name, numel, shares, STRATEGIES, merge_seconds, how, index_form, rounds, ring, patience)
                rows += list(sparse_rows(Place(count, rate, links), job))
    answers = claim_documents(claims(rows))
    if out:
        save_record(make_record("sparse", rows, claims=answers, local=local), out)
    if json:
        print_json({"rows": rows, "claims": answers, "local": local})
    else:
        _print(rows, answers, local)


def _parse_densities(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise PenstockError(
            f"--densities: found {text!r}; wanted numbers with commas between, as 0.001,0.005"
        ) from None


def _milliseconds(seconds: float | None) -> object:
    return "" if seconds is None else round(1e3 * seconds, 2)


def _print(rows: list[dict[str, Any]], answers: list[dict[str, Any]], local: list[dict[str, float]]) -> None:
    columns = ("hosts", "engine", "density", "strategy", "merges")
    table = [
        [row[name] if row[name] is not None else "" for name in columns]
        + [_milliseconds(row[name]) for name in _TIMES]
        + [f"{row['error']:+.0%}", _milliseconds(row["alpha_beta_seconds"])]
        for row in rows
    ]
    times = ("median", "spread", "floor", "messages", "merges", "predicted", "error", "sharing nothing")
    print_table("sparse all-reduce, milliseconds", (*columns, *times), table)
    print_table(
        "one rank by itself, milliseconds",
        tuple(local[0]),
        [[one["density"], *(round(1e3 * value, 2) for value in list(one.values())[1:])] for one in local],
    )
    print_claims(answers)


if __name__ == "__main__":
    start(sparse)
