"""`penstock bench replay`, `scaling` and `rates`: replayed iterations on emulated hosts, measured beside simulated."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import JsonOption, RecordOption, parse_counts

if TYPE_CHECKING:
    from penstock.bench.jobs import Place
    from penstock.bench.replay_worker import ReplayJob

PlannersOption = Annotated[str, typer.Option("--planners", help="whose plans to replay")]
IterationsOption = Annotated[int, typer.Option("--iterations", help="of each plan, after one to warm up", min=1)]
BytesOption = Annotated[int, typer.Option("--nbytes", help="of the single message", min=4)]
TraceOption = Annotated[str, typer.Option("--trace", help="what to replay")]
MESSAGE_STRATEGIES = ("native", "ring")  # the engine's own all-reduce and ours
REPETITIONS = 5  # of each single message


def bench_replay(
    hosts: Annotated[str, typer.Option(help="numbers of emulated hosts")] = "4",
    rate: Annotated[str, typer.Option(help="of each NIC")] = "1gbit",
    traces: Annotated[str, typer.Option(help="what to replay")] = "resnet50,googlenet,densenet201,resnet152,lstm_ptb",
    planners: PlannersOption = "wfbp,single,threshold,exact",
    iterations: IterationsOption = 3,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Replay traces by several planners' plans and compare with their simulation. Needs root."""
    from penstock.bench.jobs import Place
    from penstock.bench.replay_worker import ReplayJob

    places = [Place(count, rate) for count in parse_counts(hosts, "--hosts")]
    job = ReplayJob(tuple(traces.split(",")), tuple(planners.split(",")), iterations)
    _run("replay", places, job, out, json)


def bench_scaling(
    hosts: Annotated[str, typer.Option(help="numbers of emulated hosts")] = "2,4,8,16",
    rate: Annotated[str, typer.Option(help="of each NIC")] = "1gbit",
    trace: TraceOption = "googlenet",
    planners: PlannersOption = "wfbp,threshold,exact",
    iterations: IterationsOption = 3,
    nbytes: BytesOption = 16_000_000,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Time one all-reduce and one replayed trace on more and more hosts. Needs root."""
    from penstock.bench.jobs import Place

    places = [Place(count, rate) for count in parse_counts(hosts, "--hosts")]
    _run("scaling", places, _job(trace, planners, iterations, nbytes), out, json)


def bench_rates(
    rates: Annotated[str, typer.Option(help="of each NIC, with commas between")] = "100mbit,500mbit,1gbit,2gbit,none",
    hosts: Annotated[int, typer.Option(help="number of emulated hosts", min=2)] = 4,
    trace: TraceOption = "googlenet",
    planners: PlannersOption = "threshold,exact",
    iterations: IterationsOption = 2,
    nbytes: BytesOption = 16_000_000,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Time one all-reduce and one replayed trace on slower and faster links. Needs root."""
    from penstock.bench.jobs import Place

    places = [Place(hosts, rate.strip()) for rate in rates.split(",")]
    _run("rates", places, _job(trace, planners, iterations, nbytes), out, json)


def _job(trace: str, planners: str, iterations: int, nbytes: int) -> "ReplayJob":
    from penstock.bench.replay_worker import ReplayJob

    names = tuple(planners.split(","))
    return ReplayJob((trace,), names, iterations, MESSAGE_STRATEGIES, nbytes, REPETITIONS)


def _run(benchmark: str, places: "list[Place]", job: "ReplayJob", out: str, json: bool) -> None:
    from penstock.bench.record import make_record, save_record
    from penstock.bench.replay import count_steps, replay_rows
    from penstock.cli.output import print_json
    from penstock.cli.progress import progress
    from penstock.planners import find_planner
    from penstock.traces import find_trace

    for planner in job.planners:
        find_planner(planner)
    for trace in job.traces:
        find_trace(trace)
    with progress(benchmark, count_steps(places, job)) as done:
        rows = list(replay_rows(places, job, done))
    if out:
        save_record(make_record(benchmark, rows), out)
    if json:
        print_json(rows)
    else:
        _print(benchmark, rows)


def _print(benchmark: str, rows: list[dict[str, Any]]) -> None:
    from penstock.cli.output import format_seconds, print_table

    print_table(
        f"{benchmark}: measured on emulated hosts, and simulated",
        ("hosts", "rate", "what", "how", "messages", "measured", "spread", "simulated", "error"),
        [
            (
                *(row[name] for name in ("hosts", "rate", "what", "how", "messages")),
                *(format_seconds(row[name]) for name in ("measured_seconds", "spread", "simulated_seconds")),
                f"{100 * row['error']:+.1f}%",
            )
            for row in rows
        ],
    )
