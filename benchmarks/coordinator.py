"""Many small messages, compressed gradients on their way to aggregators: at will, in bulks, or as rank 0 decides.

`bulks` is what training does: the plan says once which gradients travel together, and each bulk is sent when its last
gradient is ready. `steady` also fixes who sends to whom when, and `online` decides both while gradients become ready.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from threading import Thread
from time import perf_counter, sleep
from typing import Annotated, Any

import numpy as np
import typer

from bulk import Lanes, Online, run_at_will, run_steady
from bulk_schedule import Bulk, Message, Sending, plan_rounds
from penstock.bench.jobs import Place, run_job, serve
from penstock.bench.record import make_record, save_record
from penstock.cli.options import JsonOption, RecordOption, parse_counts
from penstock.cli.output import format_seconds, print_json, print_table, progress
from penstock.cost.ways import Way
from penstock.network import LinearCost
from penstock.planners import PLANNERS
from penstock.planners.batched import in_bulks
from penstock.runtime.measure_network import measure_network
from penstock.runtime.timed import largest
from penstock.runtime.transport import Transport
from penstock.simulator.iteration import predict
from penstock.trace import Trace
from penstock.traces import find_trace
from study import RANK, start

WAIT_SECONDS = 60.0
HEADER_NBYTES = 57  # of a onebit payload
DECIDERS = ("at will", "bulks", "online", "steady")
WORKER = (__file__, RANK)
TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class CoordinatorJob:
    """What the ranks are asked to measure."""

    trace: str
    iterations: int  # of each decider, after one to warm up
    threshold_nbytes: int
    timeout_seconds: float


def pushes(trace: Trace, world_size: int) -> list[Message]:
    """Return every rank's piece of every tensor for every aggregator: one bit an element, one piece a rank."""
    gradients = zip(trace.tensors, trace.ready_seconds, strict=True)
    return _from_all_to_all(
        [(each.name, _piece_nbytes([each.numel], world_size), at) for each, at in gradients], world_size
    )


def bulk_pushes(trace: Trace, world_size: int, link: LinearCost) -> list[Message]:
    """Return the same in the bulks of a plan with a bucket for each tensor."""
    others, numel = world_size - 1, {each.name: each.numel for each in trace.tensors}
    line = LinearCost(others * link.a_seconds, others * link.b_seconds_per_byte / (32 * world_size))
    way = Way("push", (line,), seconds_per_tensor=others * link.b_seconds_per_byte * HEADER_NBYTES)
    plan = predict(trace, PLANNERS["wfbp"], [way], world_size)
    messages = in_bulks(plan, trace, [way]).messages
    at = dict(zip(numel, trace.ready_seconds, strict=True))
    return _from_all_to_all(
        [
            (each.name, _piece_nbytes([numel[name] for name in each.tensors], world_size), at[each.tensors[-1]])
            for each in messages
        ],
        world_size,
    )


def _piece_nbytes(numels: Sequence[int], world_size: int) -> int:
    return sum(HEADER_NBYTES + numel // (8 * world_size) for numel in numels)


def _from_all_to_all(pieces: Sequence[tuple[str, int, float]], world_size: int) -> list[Message]:
    return [
        Message(f"{name}:{source}>{target}", nbytes, source, target, at)
        for name, nbytes, at in pieces
        for source in range(world_size)
        for target in range(world_size)
        if source != target
    ]


def measure_job(transport: Transport, job: CoordinatorJob, done: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield a row for each decider; the deciders take turns."""
    trace, bulk = find_trace(job.trace), Bulk(job.threshold_nbytes, job.timeout_seconds)
    table = pushes(trace, transport.world_size)
    network = measure_network(transport).network
    in_bulks = bulk_pushes(trace, transport.world_size, network.link)
    lanes, bulks = (_lanes(transport, each) for each in (table, in_bulks))
    schedule = plan_rounds(table, network.link, bulk)
    side = Online(lanes, bulk)
    times: dict[str, list[float]] = {name: [] for name in DECIDERS}
    for _ in range(job.iterations + 1):
        for name, found in times.items():
            found.append(_iteration(bulks if name == "bulks" else lanes, name, side, schedule))
            done(name)
    side.close()
    lanes.close()
    bulks.close()
    batches = {"bulks": len(bulks.mine), "steady": sum(sending.batch.link[0] == 0 for sending in schedule)}
    for name, found in times.items():
        yield {
            "what": job.trace,
            "how": name,
            "messages_per_rank": sum(message.source == 0 for message in table),
            "batches_per_rank": batches.get(name),
            "measured_seconds": median(found[1:]),
            "spread": max(found[1:]) - min(found[1:]),
            "simulated_seconds": max(sending.end_seconds for sending in schedule) if name == "steady" else None,
        }


def _lanes(transport: Transport, table: Sequence[Message]) -> Lanes:
    memory = {one.name: np.zeros(one.nbytes, np.uint8) for one in table if transport.rank in one.link}
    return Lanes(transport, table, memory, WAIT_SECONDS)


def _iteration(lanes: Lanes, decider: str, side: Online, schedule: list[Sending]) -> float:
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


def coordinator(
    hosts: Annotated[str, typer.Option(help="numbers of emulated hosts")] = "4",
    rate: Annotated[str, typer.Option(help="of each NIC")] = "1gbit",
    trace: Annotated[str, typer.Option(help="whose gradients travel to aggregators, one bit an element")] = "resnet50",
    threshold: Annotated[int, typer.Option(help="bytes at which a link is due", min=1)] = 65_536,
    timeout: Annotated[float, typer.Option(help="seconds after which a link is due", min=0.0)] = 0.005,
    iterations: Annotated[int, typer.Option(help="of each decider, after one to warm up", min=1)] = 5,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Push a model's compressed gradients to aggregators on emulated hosts, by four deciders in turn. Needs root."""
    find_trace(trace)
    job = CoordinatorJob(trace, iterations, threshold, timeout)
    places = [Place(count, rate) for count in parse_counts(hosts, "--hosts")]
    rows = []
    with progress("coordinator", len(places) * len(DECIDERS) * (iterations + 1)) as done:
        for place in places:
            tell = partial(_tell, done, place.hosts)
            found = run_job(place, WORKER, asdict(job), tell, TIMEOUT_SECONDS)
            rows += [{"hosts": place.hosts, "rate": place.rate, **row} for row in found]
    if out:
        save_record(make_record("coordinator", rows, threshold_nbytes=threshold, timeout_seconds=timeout), out)
    if json:
        print_json(rows)
        return
    print_table(
        f"pushing {trace}'s gradients, one bit an element, to aggregators",
        ("hosts", "who decides", "messages per rank", "measured", "spread"),
        [
            (
                *(row[name] for name in ("hosts", "how", "messages_per_rank")),
                *(format_seconds(row[name]) for name in ("measured_seconds", "spread")),
            )
            for row in rows
        ],
    )


def _tell(done: Callable[[str], None], hosts: int, what: str) -> None:
    done(f"{hosts} hosts, {what}")


def _rank() -> None:
    serve(lambda document: CoordinatorJob(**document), measure_job)


if __name__ == "__main__":
    start(coordinator, _rank)
