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
    from penstock.trace import Trace


def plan(
    trace: TraceArgument,
    network: NetworkOption,
    planner: Annotated[
        str, typer.Option(help="naive, wfbp, single, threshold, greedy, exact, ...", autocompletion=complete_planners)
    ] = "exact",
    workers: Annotated[int | None, typer.Option(help="world size; default: the network's", min=1, max=10**18)] = None,
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
    lanes: Annotated[int, typer.Option(help="buckets under way at a time; in training on CPUs 4", min=1)] = 1,
    dtype: DtypeOption = "",
    compare: Annotated[bool, typer.Option("--compare", help="show every planner, not only --planner")] = False,
    out: Annotated[str, typer.Option(metavar="FILE", help="write the plan here")] = "",
    picture: PictureOption = "",
    perfetto: Annotated[str, typer.Option(metavar="FILE", help="write timelines as a Chrome trace")] = "",
    names: ListOption = False,
    json: JsonOption = False,
) -> None:
    """Plan the messages of one iteration and predict its time.

    With several --all-reduce, or with --codecs, exact and joint pick one way for each bucket. Messages go one after the
    other, as planners have it. With --lanes several are under way at a time, as in training on CPUs and in `penstock
    replay`: plans are then timed so, and cut finer where that is clearly faster. That takes up to some seconds, so
    other planners stand beside the chosen one only with --compare; at most 60,000 instructions are timed for each,
    plans that go beyond are left out, and a plan with more by itself is timed as if its messages went one after the
    other: a line says so.
    """
    from penstock.cost.clusters import find_network
    from penstock.plan import plan_document, save_plan
    from penstock.planners import PLANNERS, find_planner
    from penstock.planners.batched import in_bulks
    from penstock.simulator.composition import plans_in_lanes
    from penstock.simulator.iteration import predict, timed
    from penstock.traces import find_trace

    chosen = find_planner(planner)
    subject, links = find_trace(trace), find_network(network)
    subject = subject.with_dtype(dtype) if dtype else subject
    world_size = workers or links.workers
    ways = _ways(
        links, all_reduce, world_size, split_codecs(codecs, links.codecs), parse_counts(partitions, "--partitions")
    )
    compared = PLANNERS.values() if compare or not (json or lanes > 1) else [chosen]
    notes: tuple[str, ...] = ()
    plans = {each.name: predict(subject, each, ways, world_size) for each in compared}
    if lanes > 1:
        found = {name: plans_in_lanes(each, subject, ways, links, lanes, bulk=bulk) for name, each in plans.items()}
        plans, notes = {name: each.plan for name, each in found.items()}, found[planner].notes
        lanes = found[planner].lanes
    elif bulk:
        plans = {name: timed(in_bulks(each, subject, ways), subject, ways) for name, each in plans.items()}
    if out:
        save_plan(plans[planner], out)
    _draw(plans, subject, picture, perfetto)
    if json:
        from penstock.cli.output import print_json

        documents = [plan_document(each) for each in plans.values()]
        print_json(documents if compare else plan_document(plans[planner]))
    else:
        _print(plans, planner, subject, ways, lanes)
        for note in notes:
            print(note)


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


def _print(plans: "dict[str, Plan]", planner: str, trace: "Trace", ways: "list[Way]", lanes: int) -> None:
    from penstock.cli.output import format_seconds, print_table

    at_a_time = "one message after the other" if lanes == 1 else f"up to {lanes} messages at a time"
    chosen = plans[planner]
    best = min(plan.iteration_seconds for plan in plans.values())
    source = ", ".join(f"{way.route} ({way.source})" for way in ways)
    print_table(
        f"{trace.label} on {chosen.workers} workers: predicted iteration, {at_a_time}, by {source}",
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
                format_seconds(start),
                format_seconds(end),
            )
            for index, (bucket, (start, end)) in enumerate(zip(chosen.messages, _sendings(chosen), strict=True))
        ],
    )


def _sendings(plan: "Plan") -> "list[tuple[float, float]]":
    """Return for each message when its first stage starts and its last one ends."""
    from penstock.timeline import COMMUNICATION, COMPUTATION, COMPUTE

    within = (COMPUTE, COMPUTATION, COMMUNICATION)  # the model's computation, and the parts of messages in lanes
    stages = [span for span in plan.timeline.spans if span.lane not in within]
    found = []
    for message in plan.messages:
        own = [span for span in stages if span.name == message.name]
        found.append((min(span.start_seconds for span in own), max(span.end_seconds for span in own)))
    return found
