"""`penstock replay`: real communication, computation replaced by waiting as long as the trace says."""

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import (
    JsonOption,
    TraceArgument,
    check_routes,
    complete_codecs,
    complete_networks,
    complete_planners,
    complete_strategies,
    new_file,
    parse_counts,
    split_list,
)
from penstock.errors import PlanError

if TYPE_CHECKING:
    from penstock.cluster.iteration_replay import ReplayRow
    from penstock.network import Network
    from penstock.plan import Plan
    from penstock.trace import Trace


def replay(
    trace: TraceArgument,
    plan: Annotated[str, typer.Option(metavar="FILE", help="replay this penstock-plan/1 file")] = "",
    planner: Annotated[
        str,
        typer.Option(
            help="or plan here, with these planners, for the measured network", autocompletion=complete_planners
        ),
    ] = "exact",
    strategy: Annotated[
        str, typer.Option(help="all-reduces to choose from, when planning here", autocompletion=complete_strategies)
    ] = "native",
    codecs: Annotated[
        str, typer.Option(help="compressors to choose from; joint and selective choose", autocompletion=complete_codecs)
    ] = "",
    compressed: Annotated[
        str, typer.Option(help="all-reduces that carry what is compressed", autocompletion=complete_strategies)
    ] = "ring",
    partitions: Annotated[str, typer.Option(help="numbers of pieces to choose from, with codecs")] = "1",
    network: Annotated[
        str, typer.Option(help="a network file or name; default: measured first", autocompletion=complete_networks)
    ] = "",
    iterations: Annotated[int, typer.Option(help="iterations of each plan, after one to warm up", min=1)] = 10,
    hosts: Annotated[int, typer.Option(help="start this many emulated hosts instead of joining workers", min=0)] = 0,
    rate: Annotated[str, typer.Option(help="of each emulated NIC")] = "1gbit",
    engine: Annotated[str, typer.Option(help="gloo or mpi; default: what started the workers")] = "",
    perfetto: Annotated[
        str, typer.Option(metavar="FILE", help="both timelines of every plan, as a Chrome trace", callback=new_file)
    ] = "",
    json: JsonOption = False,
) -> None:
    """Replay plans on the real network and print measured beside simulated iteration."""
    from penstock.cli.output import progress
    from penstock.cli.worker_processes import is_worker, joined_transport
    from penstock.traces import find_trace

    subject = find_trace(trace)
    routes = _routes(strategy, codecs, compressed, partitions)
    _check(subject, plan, planner, routes, network)
    if hosts == 1:
        raise PlanError("--hosts 1: one host sends nothing; wanted 2 or more")
    if hosts and not is_worker():
        raise typer.Exit(_run_on_emulated_hosts(hosts, rate, engine or "gloo"))
    with joined_transport(engine) as transport:
        from penstock.cluster.iteration_replay import replay_plans
        from penstock.cost.clusters import find_network
        from penstock.runtime.communicator import Communicator
        from penstock.runtime.measure_network import measure_network

        seconds = max(4.0, len(routes) * 2.0)
        links = (
            find_network(network)
            if network
            else measure_network(transport, seconds=seconds, strategies=routes, codecs=split_list(codecs)).network
        )
        plans = _plans(subject, links, plan, planner, routes)
        communicator, first = Communicator(transport, timeout_seconds=60.0), transport.rank == 0
        with progress("replaying", len(plans) * (iterations + 1), first and not json) as done:
            advance = partial(done, subject.model)
            rows, timelines = replay_plans(subject, plans, links, communicator, iterations, advance)
    if not first:
        return
    _print(rows, subject, links, json)
    if perfetto:
        from penstock.report.perfetto import save_perfetto

        both = {
            f"{name}, {how}": line for name, pair in timelines.items() for how, line in zip(_HOW, pair, strict=True)
        }
        save_perfetto(both, perfetto)


_HOW = ("simulated", "measured")


def _run_on_emulated_hosts(hosts: int, rate: str, engine: str) -> int:
    """Run this same command once per emulated host; only rank 0's output is shown."""
    from penstock.cluster.emulate import emulated_cluster
    from penstock.cluster.processes import RankZero

    sink = RankZero()
    with emulated_cluster(hosts, rate) as cluster:
        outcome = cluster.run([sys.executable, "-m", "penstock", *sys.argv[1:]], engine=engine, sink=sink)
    if outcome.exit_code:
        sink.explain(outcome.failed_rank)
    return outcome.exit_code


def _routes(strategy: str, codecs: str, compressed: str, partitions: str) -> list[str]:
    """Return the routes to measure and plan with, dense ones first."""
    from penstock.plan import Route

    packed = [
        str(Route(name, codec, k))
        for name in split_list(compressed)
        for codec in split_list(codecs)
        for k in parse_counts(partitions, "--partitions")
    ]
    return [*split_list(strategy), *packed]


def _check(trace: "Trace", plan: str, planners: str, routes: list[str], network: str) -> None:
    """Refuse what cannot work before any host is started or anything is measured."""
    from penstock.cost.clusters import find_network
    from penstock.plan import load_plan
    from penstock.planners import find_planner

    if network:
        find_network(network)
    if plan:
        load_plan(plan).check_against(trace)
    for name in planners.split(","):
        find_planner(name)
    check_routes(routes)


def _plans(trace: "Trace", network: "Network", plan: str, planners: str, routes: list[str]) -> "dict[str, Plan]":
    from penstock.cost.ways import comparable, way_for
    from penstock.plan import load_plan
    from penstock.planners import find_planner
    from penstock.simulator.fitted import fitted_cost
    from penstock.simulator.iteration import predict

    if plan:
        given = load_plan(plan)
        given.check_against(trace)
        return {given.planner: given}
    ways = comparable([way_for(network, route, None, fitted_cost) for route in routes])
    return {name: predict(trace, find_planner(name), ways, network.workers) for name in planners.split(",")}


def _print(rows: "list[ReplayRow]", trace: "Trace", network: "Network", json: bool) -> None:
    from penstock.cli.output import format_seconds, print_json, print_table

    if json:
        print_json([row.document() | {"model": trace.model, "workers": network.workers} for row in rows])
        return
    print_table(
        f"{trace.label} on {network.workers} workers: replayed and simulated",
        ("planner", "messages", "measured", "spread", "simulated", "error", "computation late by"),
        [
            (
                row.planner,
                row.messages,
                format_seconds(row.measured_seconds),
                format_seconds(row.spread),
                format_seconds(row.simulated_seconds),
                f"{100 * row.error:+.1f}%",
                f"{100 * row.lateness:.2f}%",
            )
            for row in rows
        ],
    )
