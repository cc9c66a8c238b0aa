"""`penstock simulate`: how a training job scales, planner by planner, without any machine."""

from typing import Annotated

import typer

from penstock.cli.options import (
    AllReduceOption,
    DtypeOption,
    JsonOption,
    ListOption,
    NetworkOption,
    PictureOption,
    TraceArgument,
    complete_codecs,
    complete_planners,
    parse_counts,
    split_codecs,
)


def simulate(
    trace: TraceArgument,
    network: NetworkOption,
    workers: Annotated[str, typer.Option(help="world sizes, such as 4,8,16")] = "4,8,16,32,64,128,256,512,1024,2048",
    planners: Annotated[
        str, typer.Option(help="planners to compare", autocompletion=complete_planners)
    ] = "wfbp,single,threshold,greedy,exact",
    all_reduce: AllReduceOption = "ring",
    codecs: Annotated[
        str,
        typer.Option(help="compressors that exact, selective and joint choose from", autocompletion=complete_codecs),
    ] = "",
    dtype: DtypeOption = "",
    jitter: Annotated[float, typer.Option(help="relative standard deviation of a worker's iteration")] = 0.0,
    straggler: Annotated[float, typer.Option(help="slow workers take this many times longer")] = 1.0,
    stragglers: Annotated[int, typer.Option(help="how many workers are slow", min=0)] = 1,
    iterations: Annotated[int, typer.Option(help="iterations to average where workers vary", min=1)] = 20,
    seed: Annotated[int, typer.Option(help="of the jitter", min=0)] = 0,
    picture: PictureOption = "",
    names: ListOption = False,
    json: JsonOption = False,
) -> None:
    """Simulate one iteration on every number of workers: speed-up and efficiency of each planner.

    Messages are taken to go one after the other, as planners have it.
    """
    from penstock.cli.output import format_seconds, print_json, print_table
    from penstock.cost.clusters import find_network
    from penstock.errors import PlanError
    from penstock.planners import find_planner
    from penstock.simulator.scaling import Variation, scaling_study
    from penstock.traces import find_trace

    subject, links = find_trace(trace), find_network(network)
    subject = subject.with_dtype(dtype) if dtype else subject
    counts = parse_counts(workers, "--workers")
    chosen = [find_planner(name.strip()) for name in planners.split(",")]
    if stragglers != 1 and straggler == 1.0:
        raise PlanError(f"--stragglers {stragglers} without --straggler: wanted how many times longer they take")
    slow = stragglers if straggler != 1.0 else 0
    variation = Variation(jitter, straggler, slow, iterations, seed)
    varies = variation if jitter or slow else None
    rows = scaling_study(subject, links, counts, chosen, all_reduce, varies, split_codecs(codecs, links.codecs))
    if picture:
        from penstock.report.pictures import draw_scaling

        draw_scaling(rows, picture, f"{subject.label} on {links.name}, {all_reduce} all-reduce, simulated")
    if json:
        print_json([row.document() | {"times": subject.times} for row in rows])
        return
    print_table(
        f"{subject.label}, batch {subject.batch} on {subject.device}; network {links.name}",
        ("workers", "planner", "messages", "by", "iteration", "not hidden", "speed-up", "efficiency"),
        [
            (
                row.workers,
                row.planner,
                row.messages,
                ", ".join(row.routes),
                format_seconds(row.iteration_seconds),
                format_seconds(row.non_overlapped_seconds),
                f"{row.speedup:.4g}",
                f"{100 * row.efficiency:.1f}%",
            )
            for row in rows
        ],
        note=f"simulated, one message after the other{'' if not picture else '; drawn in ' + picture}",
    )
