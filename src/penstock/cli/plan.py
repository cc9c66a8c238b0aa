"""`penstock plan`: which gradients should travel together, and what that costs."""

from typing import TYPE_CHECKING, Annotated

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
    split_list,
)

if TYPE_CHECKING:
    from penstock.cost.ways import Way
    from penstock.network import Network
    from penstock.plan import Plan
    from penstock.timeline import Span
    from penstock.trace import Trace


def plan(
    trace: TraceArgument,
    network: NetworkOption,
    planner: Annotated[
        str, typer.Option(help="naive, wfbp, single, threshold, greedy, exact, ...", autocompletion=complete_planners)
    ] = "exact",
    workers: Annotated[int | None, typer.Option(help="world size; default: the network's", min=1)] = None,
    all_reduce: AllReduceOption = "",
    codecs: Annotated[
        str,
        typer.Option(
            help="compressors to choose from, their curves in the network file", autocompletion=complete_codecs
        ),
    ] = "",
    partitions: Annotated[str, typer.Option(help="numbers of pieces to choose from, with codecs")] = "1",
    bulk: Annotated[
        bool, typer.Option("--bulk", help="buckets in a row travel as one message where that pays")
    ] = False,
    dtype: DtypeOption = "",
    compare: Annotated[bool, typer.Option("--compare", help="show every planner, not only --planner")] = False,
    out: Annotated[str, typer.Option(metavar="FILE", help="write the plan here")] = "",
    picture: PictureOption = "",
    perfetto: Annotated[str, typer.Option(metavar="FILE", help="write timelines as a Chrome trace")] = "",
    names: ListOption = False,
    json: JsonOption = False,
) -> None:
    """Plan the messages of one iteration and predict its time.

    With several --all-reduce, or with --codecs, exact and joint pick one way for each bucket. Messages are taken to go
    one after the other, as planners have it; in training on CPUs, and in `penstock replay`, several are under way at a
    time.
    """
    from penstock.cost.clusters import find_network
    from penstock.plan import plan_document, save_plan
    from penstock.planners import PLANNERS, find_planner
    from penstock.planners.batched import in_bulks
    from penstock.simulator.iteration import predict, timed
    from penstock.traces import find_trace

    chosen = find_planner(planner)
    subject, links = find_trace(trace), find_network(network)
    subject = subject.with_dtype(dtype) if dtype else subject
    world_size = workers or links.workers
    ways = _ways(
        links, all_reduce, world_size, split_codecs(codecs, links.codecs), parse_counts(partitions, "--partitions")
    )
    compared = PLANNERS.values() if compare or not json else [chosen]
    plans = {each.name: predict(subject, each, ways, world_size) for each in compared}
    if bulk:
        plans = {name: timed(in_bulks(each, subject, ways), subject, ways) for name, each in plans.items()}
    if out:
        save_plan(plans[planner], out)
    _draw(plans, subject, picture, perfetto)
    if json:
        from penstock.cli.output import print_json

        documents = [plan_document(each) for each in plans.values()]
        print_json(documents if compare else plan_document(plans[planner]))
    else:
        _print(plans, planner, subject, ways)


def _ways(network: "Network", all_reduce: str, workers: int, codecs: list[str], partitions: list[int]) -> "list[Way]":
    """Return dense ways first: planners that take one way for all take the first."""
    from penstock.cost.ways import comparable, way_for, ways_for
    from penstock.simulator.fitted import fitted_cost

    measured = next(iter(network.all_reduce), "ring") if workers == network.workers else "ring"
    routes = split_list(all_reduce or measured)
    plain = [route for route in routes if "+" not in route]
    packed = [way_for(network, route, workers, fitted_cost) for route in routes if "+" in route]
    for codec in codecs:
        if codec not in network.codecs:
            way_for(network, f"ring+{codec}", workers)  # says what to do where its curves are not there
    return comparable([*ways_for(network, plain, codecs, partitions, workers, fitted_cost), *packed])


def _draw(plans: "dict[str, Plan]", trace: "Trace", picture: str, perfetto: str) -> None:
    timelines = {name: plan.timeline for name, plan in plans.items()}
    if picture:
        from penstock.report.pictures import draw_timelines

        draw_timelines(timelines, picture, f"{trace.label}: one iteration, predicted")
    if perfetto:
        from penstock.report.perfetto import save_perfetto

        save_perfetto(timelines, perfetto)


def _print(plans: "dict[str, Plan]", planner: str, trace: "Trace", ways: "list[Way]") -> None:
    from penstock.cli.output import format_seconds, print_table

    chosen = plans[planner]
    best = min(plan.iteration_seconds for plan in plans.values())
    source = ", ".join(f"{way.route} ({way.source})" for way in ways)
    print_table(
        f"{trace.label} on {chosen.workers} workers: predicted iteration, one message after the other, by {source}",
        ("planner", "messages", "iteration", "not hidden", "against best"),
        [
            (
                f"{name} <" if name == planner else name,
                len(plan.messages),
                format_seconds(plan.iteration_seconds),
                format_seconds(plan.non_overlapped_seconds),
                f"{plan.iteration_seconds / best:.3f}x" if best else "1.000x",
            )
            for name, plan in plans.items()
        ],
    )
    print_table(
        f"buckets of {planner} (hash {chosen.hash})",
        ("bucket", "tensors", "bytes", "route", "sent from", "to"),
        [
            (
                index,
                f"{len(bucket.tensors)}: {bucket.name}",
                bucket.nbytes,
                str(bucket.route),
                format_seconds(span.start_seconds),
                format_seconds(span.end_seconds),
            )
            for index, (bucket, span) in enumerate(zip(chosen.messages, _sendings(chosen), strict=True))
        ],
    )


def _sendings(plan: "Plan") -> "list[Span]":
    """Return one span per message, from the start of its first stage to the end of its last."""
    from penstock.timeline import COMPUTE, Span

    spans = [span for span in plan.timeline.spans if span.lane != COMPUTE]
    stages = len(spans) // len(plan.messages)
    groups = [spans[i : i + stages] for i in range(0, len(spans), stages)]
    return [Span(g[0].name, g[0].lane, g[0].start_seconds, g[-1].end_seconds) for g in groups]
