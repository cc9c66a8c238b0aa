"""`penstock bench coordinator`: many small messages, sent at will, as rank 0 decides, or by a schedule made once."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer

from penstock.cli.options import JsonOption, RecordOption, parse_counts

WORKER = "penstock.bench.coordinator_worker"
TIMEOUT_SECONDS = 300.0


def bench_coordinator(
    hosts: Annotated[str, typer.Option(help="numbers of emulated hosts")] = "4",
    rate: Annotated[str, typer.Option(help="of each NIC")] = "1gbit",
    trace: Annotated[str, typer.Option(help="whose gradients travel to aggregators, one bit an element")] = "resnet50",
    threshold: Annotated[int, typer.Option(help="bytes at which a link is due", min=1)] = 65_536,
    timeout: Annotated[float, typer.Option(help="seconds after which a link is due", min=0.0)] = 0.005,
    iterations: Annotated[int, typer.Option(help="of each decider, after one to warm up", min=1)] = 5,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Push a model's compressed gradients to aggregators on emulated hosts, by three deciders in turn. Needs root."""
    from penstock.bench.coordinator_worker import DECIDERS, CoordinatorJob
    from penstock.bench.jobs import Place, run_job
    from penstock.bench.record import make_record, save_record
    from penstock.cli.output import format_seconds, print_json, print_table
    from penstock.cli.progress import progress
    from penstock.traces import find_trace

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
