"""What each idea of HiPress adds, replayed on emulated hosts: its Fig. 11 as our own table; and `joint` beside others.

Communication and compression are real, computation is waiting as long as the trace says. A rank measures the network
with all routes that are used, then replays the configurations.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import typer

from configurations import Configuration, hand_made, joint, steps
from penstock.bench.jobs import Done, Place, run_job, serve
from penstock.bench.record import make_record, save_record
from penstock.cli.options import JsonOption, RecordOption, parse_counts, split_list
from penstock.cli.output import format_seconds, print_json, print_table, progress
from penstock.cli.routes import check_routes
from penstock.cluster.iteration_replay import replay_plans
from penstock.cost.ways import comparable
from penstock.errors import PenstockError
from penstock.network import Network
from penstock.plan import Plan, parse_route
from penstock.runtime.communicator import Communicator
from penstock.runtime.measure_network import NATIVE, measure_network
from penstock.runtime.transport import Transport
from penstock.simulator.composition import plan_in_lanes
from penstock.simulator.iteration import predict_robust
from penstock.trace import Trace
from penstock.traces import find_trace
from study import RANK, start

WAIT_SECONDS = 120.0
_SECONDS_PER_ROUTE = 3.0  # of measuring; more hosts on the same cores take longer
WORKER = (__file__, RANK)
_TIMEOUT_SECONDS = 900.0
CODECS = "onebit,terngrad(bitwidth=2)"


@dataclass(frozen=True, slots=True)
class CasyncJob:
    """What the ranks are asked to replay."""

    trace: str
    strategy: str  # of compressed buckets, in the steps
    codecs: tuple[str, ...]  # the first one in the steps
    iterations: int  # of each configuration, after one to warm up
    study: str = "steps"  # or "joint": beside the hand-made configurations whose names are in `only`
    only: int = 4  # how many of the best-predicted hand-made configurations are replayed too

    def configurations(self, hosts: int) -> list[Configuration]:
        """Return all that may be replayed."""
        if self.study == "steps":
            return steps(self.strategy, self.codecs[0], hosts)
        return [*hand_made(NATIVE, self.codecs), joint(NATIVE, self.codecs)]


def measure_job(transport: Transport, job: CasyncJob, done: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield a row for every replayed configuration; every rank must call this with the same job."""
    hosts, trace = transport.world_size, find_trace(job.trace)
    found = job.configurations(hosts)
    routes = list(dict.fromkeys(route for each in found for route in each.routes))
    codecs = list(dict.fromkeys(codec for route in routes if (codec := parse_route(route).codec)))
    seconds = _SECONDS_PER_ROUTE * len(routes) * max(1.0, hosts / 4)
    network = measure_network(
        transport, seconds=seconds, strategies=routes, codecs=codecs, whole_nbytes=sum(trace.nbytes)
    ).network
    plans = {each.name: _in_lanes(each, each.plan(trace, network), trace, network) for each in found}
    if job.study == "joint":
        chosen = found[-1]
        robust = predict_robust(trace, chosen.planner, comparable(chosen.ways(network)), hosts)
        plans["joint"] = _in_lanes(chosen, robust, trace, network)
        quickest = sorted(plans, key=lambda name: plans[name].iteration_seconds)
        kept = {"joint", *[name for name in quickest if name != "joint"][: job.only]}
        plans = {name: plan for name, plan in plans.items() if name in kept}
    communicator = Communicator(transport, timeout_seconds=WAIT_SECONDS)
    lanes = {each.name: each.lanes for each in found}
    rows, _ = replay_plans(trace, plans, network, communicator, job.iterations, lambda: done(job.trace), lanes)
    for name, row in zip(plans, rows, strict=True):
        packed = sum(bucket.nbytes for bucket in plans[name].buckets if bucket.codec is not None)
        document = row.document()
        document.pop("planner")
        share = packed / max(1, sum(trace.nbytes))
        used = ", ".join(dict.fromkeys(str(bucket.route) for bucket in plans[name].buckets))
        yield {"what": job.trace, "how": name, "routes": used, "compressed_share": share, **document}


def _in_lanes(made: Configuration, plan: Plan, trace: Trace, network: Network) -> Plan:
    """Return a configuration's plan, timed and, by planners that choose, planned for its lanes."""
    return plan_in_lanes(plan, trace, comparable(made.ways(network)), network, made.lanes, bulk=made.bulk)


def casync_rows(place: Place, job: CasyncJob, done: Done) -> Iterator[dict[str, Any]]:
    """Measure the job at a place; each row says how much faster it is than the one before it and than the first."""
    before = first = None
    for row in run_job(place, WORKER, asdict(job), partial(_tell, done, place), _TIMEOUT_SECONDS):
        seconds = row["measured_seconds"]
        first = first or seconds
        gain = {"times_as_fast_as_before": (before or seconds) / seconds} if job.study == "steps" else {}
        yield {"hosts": place.hosts, "rate": place.rate, **row, **gain, "times_as_fast": first / seconds}
        before = seconds


def _tell(done: Done, place: Place, what: str) -> None:
    done(f"{place.hosts} hosts at {place.rate}, {what}")


def casync(
    hosts: Annotated[str, typer.Option(help="numbers of emulated hosts")] = "4",
    rate: Annotated[str, typer.Option(help="of each NIC")] = "1gbit",
    traces: Annotated[str, typer.Option(help="what to replay, each with the strategy of its buckets")] = (
        "vgg16:parameter_server,bert_base:ring"
    ),
    codecs: Annotated[str, typer.Option(help="compressors; the first one in the steps of Fig. 11")] = CODECS,
    study: Annotated[str, typer.Option(help="steps (Fig. 11), or joint: beside the best hand-made ones")] = "steps",
    iterations: Annotated[int, typer.Option(help="of each configuration, after one to warm up", min=1)] = 2,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Replay stock, + codec, + pipelining, + bulk, + selective on emulated hosts. Needs root."""
    jobs = [_job(each, split_list(codecs), iterations, study) for each in traces.split(",")]
    places = [Place(count, rate) for count in parse_counts(hosts, "--hosts")]
    total = len(places) * len(jobs) * 5 * (iterations + 1)
    with progress("casync", total) as done:
        rows = [row for place in places for job in jobs for row in casync_rows(place, job, done)]
    if out:
        save_record(make_record("casync" if study == "steps" else "joint_replayed", rows), out)
    if json:
        print_json(rows)
    else:
        _print(rows)


def _job(text: str, codecs: list[str], iterations: int, study: str) -> CasyncJob:
    if study not in ("steps", "joint"):
        raise PenstockError(f"--study: found {study!r}; wanted steps or joint")
    trace, _, strategy = text.partition(":")
    find_trace(trace)
    check_routes(f"{strategy or 'ring'}+{codec}" for codec in codecs)
    return CasyncJob(trace, strategy or "ring", tuple(codecs), iterations, study)


def _print(rows: list[dict[str, Any]]) -> None:
    print_table(
        "replayed on emulated hosts",
        ("hosts", "what", "how", "messages", "compressed", "measured", "spread", "times as fast", "simulated", "error"),
        [
            (
                *(row[name] for name in ("hosts", "what", "how", "messages")),
                f"{100 * row['compressed_share']:.0f}%",
                *(format_seconds(row[name]) for name in ("measured_seconds", "spread")),
                f"{row['times_as_fast']:.2f}",
                format_seconds(row["simulated_seconds"]),
                f"{100 * row['error']:+.1f}%",
            )
            for row in rows
        ],
    )


def _rank() -> None:
    serve(lambda document: CasyncJob(**document | {"codecs": tuple(document["codecs"])}), measure_job)


if __name__ == "__main__":
    start(casync, _rank)
