"""`penstock demo`: one training with torch's DDP, with the optimal plan, and compressed; then a table and a page."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import JsonOption, new_folder

if TYPE_CHECKING:
    from penstock.run_record import RunRecord
    from penstock.train.job import Job


def demo(
    out: Annotated[str, typer.Option(metavar="DIR", help="runs and report.html go here", callback=new_folder)] = "demo",
    task: Annotated[str, typer.Option(help="a name, FILE.py:function or package.module:function")] = "chars",
    workers: Annotated[int, typer.Option(help="local workers", min=1)] = 4,
    rate: Annotated[str, typer.Option(help="of each emulated NIC, where this machine can emulate hosts")] = "1gbit",
    steps: Annotated[int, typer.Option(help="iterations of each run", min=1)] = 60,
    codecs: Annotated[str, typer.Option(help="compressors to try, with commas between")] = "fp8",
    json: JsonOption = False,
) -> None:
    """Train three ways, one after the other, and show what each cost and what it learned."""
    from penstock.cli.output import print_json, stderr_console
    from penstock.cli.train_jobs import check_job
    from penstock.cli.train_run import Shown, print_runs, run
    from penstock.cluster.topology import parse_rates
    from penstock.report.write_report import write_report
    from penstock.run_record import run_document

    if rate:
        parse_rates(rate, workers)
    jobs = _jobs(task, workers, steps, codecs)
    for job in jobs:
        check_job(job, "")
    obstacle = why_not_emulated(workers, rate)
    where = f"over loopback, because {obstacle}" if obstacle else f"on emulated hosts with NICs of {rate}"
    stderr_console().print(f"{workers} workers {where}", highlight=False)
    records: list[RunRecord] = []
    for job in jobs:
        record = run(job, "" if obstacle else rate, 0, Shown(json=False, out=out, tensorboard=""))
        assert record is not None, "a demo is never one of several workers"
        records.append(record)
    written = write_report(Path(out), None, None, 100)
    if json:
        print_json({"page": str(written.page), "runs": [run_document(record) for record in records]})
        return
    print_runs(records, json=False)
    print(f"open {written.page} in a browser: curves, timelines, and what other networks would make of it")


def _jobs(task: str, workers: int, steps: int, codecs: str) -> "list[Job]":
    from penstock.train.job import STOCK, Job

    planned = Job(task=task, workers=workers, steps=steps)
    compressed = [replace(planned, codec=codec) for codec in codecs.split(",") if codec]
    return [replace(planned, planner=STOCK), planned, *compressed]


def why_not_emulated(workers: int, rate: str) -> str:
    """Return why this machine cannot emulate hosts, or an empty string where it just did."""
    from penstock.cluster.emulate import emulated_cluster
    from penstock.errors import ClusterError

    if not rate:
        return "no rate was asked for"
    try:
        with emulated_cluster(workers, rate):
            return ""
    except ClusterError as error:
        return str(error)
