"""Replayed iterations and single messages on emulated hosts, measured beside simulated.

Several questions share this: which planner is fastest and how well it was predicted, what more hosts do, what other
rates do. Simulated times come from the network as measured in the same run. Run as a program, this file is one rank.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from penstock.bench.jobs import LOOPBACK, Done, Place, run_job, serve
from penstock.cluster.iteration_replay import replay_plans
from penstock.cluster.topology import parse_rate
from penstock.cost.ways import way_for
from penstock.network import Network
from penstock.planners import find_planner
from penstock.runtime.communicator import Communicator
from penstock.runtime.measure_network import NATIVE, measure_network
from penstock.runtime.timed import largest
from penstock.runtime.transport import Transport
from penstock.runtime.transport.delayed import delayed
from penstock.simulator.iteration import predict
from penstock.traces import find_trace

WORKER = ("-m", "penstock.bench.replayed")
_TIMEOUT_SECONDS = 900.0
WAIT_SECONDS = 120.0
_LEAST_SECONDS = 4.0  # of measuring the network; more hosts on the same cores take longer
_ROUNDS = 100  # of which a long link delays each, and all are needed to see its bandwidth


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """What the ranks are asked to measure."""

    traces: tuple[str, ...]
    planners: tuple[str, ...]
    iterations: int  # of each trace and planner, after one to warm up
    strategies: tuple[str, ...] = ()  # all-reduces of one message
    message_nbytes: int = 0
    repetitions: int = 0  # of each message, after one to warm up
    latency_seconds: float = 0.0  # added to every message


def replay_rows(places: Sequence[Place], job: ReplayJob, done: Done) -> Iterator[dict[str, Any]]:
    """Measure the job at every place; rows come place by place."""
    for place in places:
        tell = partial(_tell, done, place)
        for row in run_job(place, WORKER, asdict(job), tell, _TIMEOUT_SECONDS):
            yield {"hosts": place.hosts, "rate": place.rate, **row, **_floor(place, row, job)}


def count_steps(places: Sequence[Place], job: ReplayJob) -> int:
    """Return how often `done` will be called."""
    replayed = len(job.traces) * len(job.planners) * (job.iterations + 1)
    return len(places) * (replayed + len(job.strategies) * (job.repetitions + 1))


def _tell(done: Done, place: Place, what: str) -> None:
    done(f"{place.hosts} hosts at {place.rate}, {what}")


def _floor(place: Place, row: dict[str, Any], job: ReplayJob) -> dict[str, Any]:
    """Return what the wire alone would take for one message: each NIC must send 2 (p - 1) / p of its bytes."""
    bits_per_second = None if place.rate == LOOPBACK else parse_rate(place.rate)
    if not row["what"].startswith("all-reduce") or bits_per_second is None:
        return {}
    return {"floor_seconds": 2 * (place.hosts - 1) / place.hosts * job.message_nbytes * 8 / bits_per_second}


def measure_job(transport: Transport, job: ReplayJob, done: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield a row for every message and every replayed plan; every rank must call this with the same job."""
    if not job.latency_seconds:
        yield from _measure_job(transport, job, done)
        return
    with delayed(transport, job.latency_seconds) as longer:
        yield from _measure_job(longer, job, done)


def _measure_job(transport: Transport, job: ReplayJob, done: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    budget = max(_LEAST_SECONDS, transport.world_size) + _ROUNDS * job.latency_seconds
    network = measure_network(transport, seconds=budget).network
    communicator = Communicator(transport, timeout_seconds=WAIT_SECONDS)
    for strategy, seconds in message_times(communicator, job, done).items():
        simulated = way_for(network, strategy).whole.seconds(job.message_nbytes)
        yield _message_row(strategy, job.message_nbytes, seconds, simulated)
    for name in job.traces:
        yield from _replay_rows(name, job, network, communicator, done)


def message_times(communicator: Communicator, job: ReplayJob, done: Callable[[str], None]) -> dict[str, list[float]]:
    """Return how long one message takes by each strategy, on the slowest rank; the strategies take turns."""
    values = np.zeros(job.message_nbytes // 4, np.float32)
    times: dict[str, list[float]] = {strategy: [] for strategy in job.strategies}
    for _ in range(job.repetitions + 1):
        for strategy, found in times.items():
            largest(communicator.transport, 0.0, WAIT_SECONDS)  # start together
            start = perf_counter()
            communicator.all_reduce(values, strategy=strategy)
            found.append(largest(communicator.transport, perf_counter() - start, WAIT_SECONDS))
            done(f"all-reduce by {strategy}")
    return {strategy: found[1:] for strategy, found in times.items()}


def _message_row(strategy: str, nbytes: int, times: Sequence[float], simulated: float) -> dict[str, Any]:
    measured = float(np.median(times))
    return {
        "what": f"all-reduce of {nbytes / 1e6:g} MB",
        "how": strategy,
        "messages": 1,
        "measured_seconds": measured,
        "spread": max(times) - min(times),
        "simulated_seconds": simulated,
        "error": simulated / measured - 1,
    }


def _replay_rows(
    name: str, job: ReplayJob, network: Network, communicator: Communicator, done: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    trace, ways = find_trace(name), [way_for(network, NATIVE)]
    plans = {each: predict(trace, find_planner(each), ways, network.workers) for each in job.planners}
    rows, _ = replay_plans(trace, plans, network, communicator, job.iterations, lambda: done(name))
    line = ways[0].whole
    constants = {"a_seconds": line.a_seconds, "b_seconds_per_byte": line.b_seconds_per_byte}  # simulated by
    for row in rows:
        document = row.document()
        yield {"what": name, "how": document.pop("planner"), **document, **constants}


def read_job(document: dict[str, Any]) -> ReplayJob:
    """Return the job; JSON has no tuples."""
    lists = {name: tuple(document[name]) for name in ("traces", "planners", "strategies")}
    return ReplayJob(**document | lists)


if __name__ == "__main__":
    serve(read_job, measure_job)
