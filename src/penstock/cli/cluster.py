"""`penstock cluster`: hosts and links emulated on this machine, to run anything on."""

import os
import sys
from dataclasses import asdict
from importlib.util import find_spec
from shutil import which
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import JsonOption
from penstock.cli.output import format_seconds, print_json, print_table
from penstock.errors import ClusterError, PenstockError, shorten

if TYPE_CHECKING:
    from penstock.cluster.check import Measured

cluster = typer.Typer(help="Emulated hosts: run a program on them, check them, clean up.", no_args_is_help=True)
PASS_THROUGH = {"allow_interspersed_args": False}  # what follows the first word of CMD belongs to CMD

HostsOption = Annotated[int, typer.Option(help="number of emulated hosts")]
RateOption = Annotated[str, typer.Option(help="of each NIC, both ways: 1gbit, none, or one per host: 1gbit,100mbit")]
UplinkOption = Annotated[str, typer.Option(help="put the hosts in racks, each joined to a core switch at this rate")]
RacksOption = Annotated[int, typer.Option(help="number of racks, with --uplink")]


@cluster.command(context_settings=PASS_THROUGH)
def run(
    command: Annotated[list[str], typer.Argument(metavar="CMD...", help="what to run, after `--`")],
    hosts: HostsOption = 4,
    rate: RateOption = "1gbit",
    uplink: UplinkOption = "",
    racks: RacksOption = 2,
    latency: Annotated[str, typer.Option(help="added to each message by penstock's own transports: 5ms")] = "",
    engine: Annotated[str, typer.Option(help="gloo: workers started as by torchrun; mpi: by mpirun")] = "gloo",
    ranks_per_host: Annotated[
        int, typer.Option("--ranks-per-host", "--per-host", help="those of a host talk over its loopback, unshaped")
    ] = 1,
    gpus: Annotated[str, typer.Option(help="shared: all ranks on one GPU, and NCCL between them")] = "none",
    env: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="for every worker; repeatable")] = None,
    grace: Annotated[float, typer.Option(help="seconds the others have to end when one worker fails", min=0.0)] = 5.0,
    timeout: Annotated[float, typer.Option(help="seconds after which all are ended; 0 is never", min=0.0)] = 0.0,
    rank0: Annotated[bool, typer.Option("--rank0", help="print rank 0's lines only, and of one that fails")] = False,
    json: Annotated[bool, typer.Option("--json", help="print how it ended as JSON, and all lines on stderr")] = False,
) -> None:
    """Run CMD once per worker, with rank, world size and rendezvous address in the environment as under torchrun."""
    from penstock.cluster.emulate import emulated_cluster
    from penstock.cluster.processes import RankZero, default_sink, on_stderr

    _refuse_without_gpu(gpus)
    first = RankZero() if rank0 else None
    sink = first or default_sink(hosts * ranks_per_host)
    environment = delay_environment(latency) | parse_environment(env or [])
    with emulated_cluster(hosts, rate, uplink=uplink or None, racks=racks if uplink else None, gpus=gpus) as emulated:
        if emulated.gpu is not None and emulated.gpu.complaint:
            typer.echo(f"penstock: {emulated.gpu.complaint}", err=True)
        outcome = emulated.run(
            command,
            engine=engine,
            per_host=ranks_per_host,
            environment=environment,
            sink=on_stderr(sink) if json else sink,
            grace_seconds=grace,
            timeout_seconds=timeout or None,
        )
    if outcome.exit_code != 0:
        if first is not None:
            first.explain(outcome.failed_rank)
        who = "mpirun" if outcome.failed_rank is None else f"rank {outcome.failed_rank}"
        typer.echo(f"penstock: {who} failed first, with exit code {outcome.exit_code}", err=True)
    if json:
        print_json(asdict(outcome))
    raise typer.Exit(outcome.exit_code)


def _refuse_without_gpu(gpus: str) -> None:
    """Raise where GPUs are to be shared, and neither NVIDIA's service nor torch knows of one.

    Without torch it is left to the command.
    """
    from penstock.cluster.gpus import CONTROL

    if gpus != "shared" or which(CONTROL) is not None or find_spec("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        raise PenstockError("--gpus shared: torch sees no GPU here; leave it out, and see `penstock doctor`")


@cluster.command()
def check(
    hosts: HostsOption = 4,
    rate: RateOption = "1gbit",
    uplink: UplinkOption = "",
    racks: RacksOption = 2,
    seconds: Annotated[float, typer.Option(help="length of a transfer; each is made three times")] = 0.2,
    tolerance: Annotated[float, typer.Option(help="exit with 1 where rates are off by more", min=0.0)] = 0.03,
    json: JsonOption = False,
) -> None:
    """Measure rate and latency between all pairs of hosts, alone and together, and compare with what was asked."""
    from penstock.cluster.check import check_cluster, worst_deviation
    from penstock.cluster.emulate import emulated_cluster

    if not 0 < seconds <= 60:
        raise ClusterError(f"--seconds {seconds:g}: wanted more than 0, at most 60")
    with emulated_cluster(hosts, rate, uplink=uplink or None, racks=racks if uplink else None) as emulated:
        measured = check_cluster(emulated, seconds)
    worst = worst_deviation(measured)
    if json:
        pairs = [asdict(pair) | {"deviation": pair.deviation} for pair in measured]
        print_json({"tolerance": tolerance, "worst_deviation": worst, "ok": worst <= tolerance, "pairs": pairs})
    else:
        columns = ("pairs", "source", "target", "asked Mb/s", "payload Mb/s", "deviation", "latency")
        note = f"largest deviation {worst:.2%}, {'within' if worst <= tolerance else 'MORE THAN'} {tolerance:.0%}"
        print_table("What the emulated hosts deliver", columns, [check_row(pair) for pair in measured], note)
    raise typer.Exit(0 if worst <= tolerance else 1)


@cluster.command()
def clean(json: JsonOption = False) -> None:
    """Remove what killed runs left behind: processes, namespaces, links. Live runs are not touched."""
    from penstock.cluster.building import require_tools, this_kernel
    from penstock.cluster.slots import clean_dead_runs

    require_tools(sys.platform, os.geteuid())
    removed = clean_dead_runs(this_kernel())
    if json:
        print_json([asdict(run) for run in removed])
    elif removed:
        rows = [(run.slot, run.namespaces, run.processes) for run in removed]
        print_table("Removed", ("slot", "namespaces", "processes"), rows)
    else:
        print("nothing to clean")


def parse_environment(settings: list[str]) -> dict[str, str]:
    """Read NAME=VALUE settings."""
    for setting in settings:
        if not setting.partition("=")[0].isidentifier() or "=" not in setting:
            raise ClusterError(f"--env {shorten(setting)}: wanted NAME=VALUE")
    return {name: value for name, _, value in (setting.partition("=") for setting in settings)}


def delay_environment(latency: str) -> dict[str, str]:
    """Return what tells penstock's transports to delay messages, and say so: other programs will not notice."""
    if not latency:
        return {}
    from penstock.cli.worker_processes import DELAY
    from penstock.cluster.topology import parse_delay

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
