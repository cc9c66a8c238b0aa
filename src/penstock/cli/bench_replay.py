"""`penstock bench replay`: replayed iterations on emulated hosts, measured beside simulated."""

from typing import Annotated, Any

import typer

from penstock.cli.options import JsonOption, RecordOption, complete_planners, complete_traces, parse_counts

MESSAGE_STRATEGIES = ("native", "ring")  # the engine's own all-reduce and ours
REPETITIONS = 5  # of each single message


def bench_replay(
    hosts: Annotated[str, typer.Option(help="numbers of emulated hosts")] = "4",
    rate: Annotated[
        list[str] | None, typer.Option(help="of each NIC, or loopback: no emulated hosts; repeatable; default 1gbit")
    ] = None,
    traces: Annotated[
        str, typer.Option(help="what to replay", autocompletion=complete_traces)
    ] = "resnet50,googlenet,densenet201,resnet152,lstm_ptb",
    planners: Annotated[
        str, typer.Option(help="whose plans to replay", autocompletion=complete_planners)
    ] = "wfbp,single,threshold,exact",
    iterations: Annotated[int, typer.Option(help="of each plan, after one to warm up", min=1)] = 3,
    nbytes: Annotated[int, typer.Option(help="time an all-reduce of so many bytes too; 0: do not", min=0)] = 0,
    name: Annotated[str, typer.Option(help="what the record calls the benchmark")] = "replay",
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Replay traces by several planners' plans and compare with their simulation. Emulated hosts need root."""
    from penstock.bench.jobs import Place
    from penstock.bench.record import make_record, save_record
    from penstock.bench.replayed import ReplayJob, count_steps, replay_rows
    from penstock.cli.output import print_json, progress
    from penstock.planners import find_planner
    from penstock.traces import find_trace

    places = [Place(count, each) for each in rate or ["1gbit"] for count in parse_counts(hosts, "--hosts")]
    message = (MESSAGE_STRATEGIES, nbytes, REPETITIONS) if nbytes else ()
    job = ReplayJob(tuple(traces.split(",")), tuple(planners.split(",")), iterations, *message)
    for planner in job.planners:
        find_planner(planner)
    for trace in job.traces:
        find_trace(trace)
    with progress(name, count_steps(places, job)) as done:
        rows = list(replay_rows(places, job, done))
    if json:
        print_json(rows)
    else:
        _print(name, rows)
    if out:
        save_record(make_record(name, rows), out)


def _print(name: str, rows: list[dict[str, Any]]) -> None:
    from penstock.cli.output import format_seconds, print_table

    print_table(
        f"{name}: measured on emulated hosts, and simulated",
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
