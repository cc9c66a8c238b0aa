"""Sparse all-reduces on emulated hosts: `penstock bench sparse`.

Every row has two predictions. `predicted_seconds` adds up the steps of the program, each as long as so many messages
and merges at once took in the same run (`rounds.py`): emulated hosts share processors. `alpha_beta_seconds` is what the
simulator says for hosts that share nothing: alpha and beta of messages in a stream, merges as on one core.
`floor_seconds` is the bytes that stand one after the other at the NIC's rate.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.bench.coarse_links import BUCKETS
from penstock.bench.jobs import Output, Place
from penstock.bench.rounds import rounds_from
from penstock.bench.sparse_worker import DENSE, Job, random_block
from penstock.cluster.emulate import emulated_cluster
from penstock.cluster.rates import parse_rates
from penstock.codecs.sparse.codec import SparseCodec
from penstock.cost.sparse import SPARSE
from penstock.errors import ClusterError
from penstock.exchange.traffic import ring_nbytes
from penstock.network import Network
from penstock.program import Op
from penstock.simulator.program import CodecCost, simulate_program
from penstock.strategies import build

STRATEGIES = ("topk_allgather", "gtopk", "gtopk_doubling")
MERGES = ("computed", "waited")
_NUMBERS = ("alpha_seconds", "beta_seconds_per_byte", "gamma_seconds_per_byte")
_TIMEOUT_SECONDS = 400.0


def sparse_rows(place: Place, job: Job, links: str = "smooth") -> Iterator[dict[str, Any]]:
    """Run a job on all hosts and yield its rows."""
    if links not in BUCKETS or job.merges not in MERGES:
        wanted = f"{' or '.join(BUCKETS)}, and {' or '.join(MERGES)}"
        raise ClusterError(f"links {links!r} and merges {job.merges!r}; wanted {wanted}")
    output = Output(lambda _: None)
    command = [sys.executable, "-m", "penstock.bench.sparse_worker", json.dumps(asdict(job))]
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with emulated_cluster(place.hosts, place.rate, bucket=BUCKETS[links]) as cluster:
        outcome = cluster.run(
            command, engine=job.engine, environment=environment, sink=output, timeout_seconds=_TIMEOUT_SECONDS
        )
    if outcome.exit_code != 0:
        raise ClusterError(output.complaint(outcome.failed_rank, outcome.exit_code))
    measured, rounds = output.results[0]["network"], {}
    for document in output.results[1:]:
        if "rounds" in document:
            rounds = document
        else:
            yield {**_row(place, job, document, measured, rounds), "links": links}


def _row(
    place: Place, job: Job, document: dict[str, Any], measured: dict[str, Any], rounds: dict[str, Any]
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
    return 8 * block_nbytes * SPARSE[strategy](place.hosts).messages / rate


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
