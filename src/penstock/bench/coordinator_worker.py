"""One rank of `penstock bench coordinator`: compressed gradients on their way to aggregators, by three deciders."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from threading import Thread
from time import perf_counter, sleep
from typing import Any

import numpy as np

from penstock.bench.serve import serve
from penstock.runtime.agree_max import largest
from penstock.runtime.bulk import Lanes, run_at_will, run_steady
from penstock.runtime.coordinator import Bulk, Message, Sending, plan_rounds
from penstock.runtime.measure_network import measure_network
from penstock.runtime.online import Online
from penstock.runtime.transport import Transport
from penstock.trace import Trace
from penstock.traces import find_trace

WAIT_SECONDS = 60.0
HEADER_NBYTES = 57  # of a onebit payload
DECIDERS = ("at will", "online", "steady")


@dataclass(frozen=True, slots=True)
class CoordinatorJob:
    """What the ranks are asked to measure."""

    trace: str
    iterations: int  # of each decider, after one to warm up
    threshold_nbytes: int
    timeout_seconds: float


def pushes(trace: Trace, world_size: int) -> list[Message]:
    """Return every rank's piece of every tensor for every aggregator: one bit an element, one piece a rank."""
    return [
        Message(
            f"{tensor.name}:{source}>{target}", HEADER_NBYTES + tensor.numel // (8 * world_size), source, target, at
        )
        for tensor, at in zip(trace.tensors, trace.ready_seconds, strict=True)
        for source in range(world_size)
        for target in range(world_size)
        if source != target
    ]


def measure_job(transport: Transport, job: CoordinatorJob, done: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield a row for each decider; the deciders take turns."""
    trace, bulk = find_trace(job.trace), Bulk(job.threshold_nbytes, job.timeout_seconds)
    table = pushes(trace, transport.world_size)
    memory = {one.name: np.zeros(one.nbytes, np.uint8) for one in table if transport.rank in one.link}
    lanes = Lanes(transport, table, memory, WAIT_SECONDS)
    network = measure_network(transport).network
    schedule = plan_rounds(table, network.link, bulk)
    side = Online(lanes, bulk)
    times: dict[str, list[float]] = {name: [] for name in DECIDERS}
    for _ in range(job.iterations + 1):
        for name, found in times.items():
            found.append(_iteration(lanes, trace, name, side, schedule))
            done(name)
    side.close()
    lanes.close()
    for name, found in times.items():
        yield _row(job.trace, name, table, schedule, found[1:])


def _iteration(lanes: Lanes, trace: Trace, decider: str, side: Online, schedule: list[Sending]) -> float:
    """Run one iteration, gradients ready when the trace says; return its seconds on the slowest rank."""
    lanes.begin()
    largest(lanes.transport, 0.0)  # start together
    start = perf_counter()
    post = side.post if decider == "online" else lanes.post
    posting = Thread(target=_post_in_time, args=(lanes, post, start))
    posting.start()
    if decider == "online":
        side.run()
    elif decider == "steady":
        run_steady(lanes, schedule)
    else:
        run_at_will(lanes)
    posting.join()
    return largest(lanes.transport, perf_counter() - start)


def _post_in_time(lanes: Lanes, post: Callable[[str], None], start: float) -> None:
    for message in lanes.mine:
        while (left := start + message.ready_seconds - perf_counter()) > 0:
            sleep(left)
        post(message.name)


def _row(trace: str, name: str, table: list[Message], schedule: list[Sending], times: list[float]) -> dict[str, Any]:
    is_steady = name == "steady"
    return {
        "what": trace,
        "how": name,
        "messages_per_rank": sum(message.source == 0 for message in table),
        "batches_per_rank": sum(sending.batch.link[0] == 0 for sending in schedule) if is_steady else None,
        "measured_seconds": median(times),
        "spread": max(times) - min(times),
        "simulated_seconds": max(sending.end_seconds for sending in schedule) if is_steady else None,
    }


if __name__ == "__main__":
    serve(lambda document: CoordinatorJob(**document), measure_job)
