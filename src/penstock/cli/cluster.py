"""`penstock cluster`: hosts and links emulated on this machine, to run anything on."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from penstock.cli.output import format_seconds, print_json, print_table

if TYPE_CHECKING:
    from penstock.cluster.check import Measured

cluster = typer.Typer(
    help="Emulated hosts on this machine: run a program on them, check them, clean up.", no_args_is_help=True
)
PASS_THROUGH = {"allow_interspersed_args": False}  # what follows the first word of CMD belongs to CMD


@cluster.command(context_settings=PASS_THROUGH)
def run(
    command: list[str] = typer.Argument(..., metavar="CMD...", help="what to run, after `--`"),
    hosts: int = typer.Option(4, help="number of emulated hosts"),
    rate: str = typer.Option("1gbit", help="of each NIC, both ways: 1gbit, none, or one per host: 1gbit,1gbit,100mbit"),
    uplink: str = typer.Option("", help="put the hosts in racks joined by links of this rate"),
    racks: int = typer.Option(2, help="number of racks, with --uplink"),
    latency: str = typer.Option("", help="added to every message by penstock's own transports, as in 5ms"),
    engine: str = typer.Option("gloo", help="gloo: workers started as torchrun would; mpi: by Open MPI's mpirun"),
    per_host: int = typer.Option(1, help="workers per host"),
    env: list[str] = typer.Option([], help="NAME=VALUE for every worker; may be given several times"),
    grace: float = typer.Option(5.0, help="seconds the others have to end by themselves when one worker fails"),
    timeout: float = typer.Option(0.0, help="seconds after which everything is ended; 0 is never"),
    rank0: bool = typer.Option(
        False, "--rank0", help="print only rank 0's output, and the last lines of one that fails"
    ),
) -> None:
    """Run CMD once per worker, with rank, world size and rendezvous address in the environment as under torchrun."""
    from penstock.cluster.emulate import emulated_cluster
    from penstock.cluster.sinks import RankZero, default_sink

    sink = RankZero() if rank0 else default_sink(hosts * per_host)
    with emulated_cluster(hosts, rate, uplink=uplink or None, racks=racks if uplink else None) as hosts_now:
        outcome = hosts_now.run(
            command,
            engine=engine,
            per_host=per_host,
            environment=delay_environment(latency) | parse_environment(env),
            sink=sink,
            grace_seconds=grace,
            timeout_seconds=timeout or None,
        )
    if outcome.exit_code != 0:
        if isinstance(sink, RankZero):
            sink.explain(outcome.failed_rank)
        who = "mpirun" if outcome.failed_rank is None else f"rank {outcome.failed_rank}"
        typer.echo(f"penstock: {who} failed first, with exit code {outcome.exit_code}", err=True)
    raise typer.Exit(outcome.exit_code)


@cluster.command()
def check(
    hosts: int = typer.Option(4, help="number of emulated hosts"),
    rate: str = typer.Option("1gbit", help="of each NIC, both ways: 1gbit, none, or one per host: 1gbit,1gbit,100mbit"),
    uplink: str = typer.Option("", help="put the hosts in racks joined by links of this rate"),
    racks: int = typer.Option(2, help="number of racks, with --uplink"),
    seconds: float = typer.Option(0.2, help="length of each transfer; each is made three times"),
    tolerance: float = typer.Option(0.03, help="deviation from the asked rate above which the exit code is 1"),
    as_json: bool = typer.Option(False, "--json", help="print JSON"),
) -> None:
    """Measure rate and latency between all pairs of hosts, alone and together, and compare with what was asked."""
    from penstock.cluster.check import check_cluster, worst_deviation
    from penstock.cluster.emulate import emulated_cluster

    with emulated_cluster(hosts, rate, uplink=uplink or None, racks=racks if uplink else None) as hosts_now:
        measured = check_cluster(hosts_now, seconds)
    worst = worst_deviation(measured)
    if as_json:
        pairs = [asdict(pair) | {"deviation": pair.deviation} for pair in measured]
        print_json({"tolerance": tolerance, "worst_deviation": worst, "ok": worst <= tolerance, "pairs": pairs})
    else:
        columns = ("pairs", "source", "target", "asked Mb/s", "payload Mb/s", "deviation", "latency")
        note = f"largest deviation {worst:.2%}, {'within' if worst <= tolerance else 'MORE THAN'} {tolerance:.0%}"
        print_table("What the emulated hosts deliver", columns, [check_row(pair) for pair in measured], note)
    raise typer.Exit(0 if worst <= tolerance else 1)


@cluster.command()
def clean(as_json: bool = typer.Option(False, "--json", help="print JSON")) -> None:
    """Remove what killed runs left behind: processes, namespaces, links. Live runs are not touched."""
    import os
    import sys

    from penstock.cluster.clean import clean_dead_runs
    from penstock.cluster.tools import require_tools

    require_tools(sys.platform, os.geteuid())
    removed = clean_dead_runs()
    if as_json:
        print_json([asdict(run) for run in removed])
    elif removed:
        rows = [(run.slot, run.namespaces, run.processes) for run in removed]
        print_table("Removed", ("slot", "namespaces", "processes"), rows)
    else:
        print("nothing to clean")


def parse_environment(settings: list[str]) -> dict[str, str]:
    """Read NAME=VALUE settings."""
    from penstock.errors import ClusterError, shorten

    for setting in settings:
        if not setting.partition("=")[0].isidentifier() or "=" not in setting:
            raise ClusterError(f"--env {shorten(setting)}: wanted NAME=VALUE")
    return {name: value for name, _, value in (setting.partition("=") for setting in settings)}


def delay_environment(latency: str) -> dict[str, str]:
    """Return what tells penstock's transports to delay messages, and say so: other programs will not notice."""
    if not latency:
        return {}
    from penstock.cli.workers import DELAY
    from penstock.cluster.rates import parse_delay

    seconds = parse_delay(latency)
    note = f"{format_seconds(seconds)} are added to each message in user space, by penstock's transports only"
    typer.echo(f"penstock: latency: {note}", err=True)
    return {DELAY: repr(seconds)}


def check_row(pair: "Measured") -> tuple[object, ...]:
    """Return one line of the table of `check`."""
    asked = "none" if pair.asked_bits_per_second is None else f"{pair.asked_bits_per_second / 1e6:.1f}"
    deviation = "" if pair.deviation is None else f"{pair.deviation:+.2%}"
    delivered = f"{pair.bits_per_second / 1e6:.1f}"
    return pair.mode, pair.source, pair.target, asked, delivered, deviation, format_seconds(pair.latency_seconds)
