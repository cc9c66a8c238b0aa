"""`penstock demo`: a GPT with AdamW, by stock DDP and by the advised settings; then a table and a page.

On emulated hosts the network is slow, as on a cluster, and four bits a gradient win. Where hosts cannot be emulated,
workers meet over loopback: there nothing waits for a network, the advised setting is `auto`, which leaves compression
off, and what a network would change is predicted.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import JsonOption, complete_codecs, complete_tasks, new_folder

if TYPE_CHECKING:
    from penstock.run_record import RunRecord
    from penstock.train.job import Job

CODEC = "blocks(bits=4)"  # what `penstock check` advises on a slow network
# Model, network, workers: near the most that merging gains. Of 210 settings (ten shipped traces, seven published
# networks, 8, 16 and 64 workers, by ring) the median is 1.02x, 63 are above 1.05x, the most is 2.46x.
MERGING = "bert_base", "hipress-100gbps", 64


def demo(
    out: Annotated[str, typer.Option(metavar="DIR", help="runs and report.html go here", callback=new_folder)] = "demo",
    task: Annotated[
        str, typer.Option(help="a name, FILE.py:function or package.module:function", autocompletion=complete_tasks)
    ] = "chars_gpt",
    workers: Annotated[int, typer.Option(help="local workers", min=1, max=1024)] = 4,
    rate: Annotated[str, typer.Option(help="of each emulated NIC, where this machine can emulate hosts")] = "500mbit",
    steps: Annotated[int, typer.Option(help="iterations of each run", min=1)] = 64,
    codecs: Annotated[
        str,
        typer.Option(
            help="compressors to try, commas between; default: what is advised here", autocompletion=complete_codecs
        ),
    ] = "",
    json: JsonOption = False,
) -> None:
    """Train a small GPT by stock DDP and with what penstock advises, and show loss against seconds."""
    from penstock.cli.output import print_json, stderr_console
    from penstock.cli.train_jobs import check_job
    from penstock.cli.train_run import Shown, print_runs, run
    from penstock.cluster.topology import parse_rates
    from penstock.report.write_report import write_report
    from penstock.run_record import run_document

    if rate:
        parse_rates(rate, workers)
    obstacle = why_not_emulated(workers, rate)
    jobs = _jobs(task, workers, steps, codecs or ("auto" if obstacle else CODEC))
    for job in jobs:
        check_job(job, "")
    where = f"over loopback, because {obstacle}" if obstacle else f"on emulated hosts with NICs of {rate}"
    stderr_console().print(f"{workers} workers {where}", highlight=False)
    shown = Shown(json=False, out=out, tensorboard="")
    records: list[RunRecord] = []
    for job in jobs:
        record = run(job, "" if obstacle else rate, 0, shown)
        assert record is not None, "a demo is never one of several workers"
        records.append(record)
    if shown.failures:
        print_runs(records, json=False)
        shown.raise_failures()
    written = write_report(Path(out), None, None, 100)
    if json:
        print_json({"page": str(written.page), "runs": [run_document(record) for record in records]})
        return
    print_runs(records, json=False)
    for line in (*_time_to_loss(records), *(_elsewhere(records) if obstacle else ()), *_merging()):
        print(line)
    print(
        f"open {written.page} in a browser: loss against seconds, timelines, and what other networks would make of it"
    )


def _jobs(task: str, workers: int, steps: int, codecs: str) -> "list[Job]":
    from penstock.train.job import STOCK, Job

    planned = Job(task=task, workers=workers, steps=steps)
    compressed = [replace(planned, codec=codec) for codec in codecs.split(",") if codec]
    return [replace(planned, planner=STOCK), *compressed]


def _time_to_loss(records: "list[RunRecord]") -> list[str]:
    """Say when each run reached the loss at which the first one ended: both have seen as much data by then or less."""
    reached = _smooth_loss(records[0])[-1:]
    if not reached or any(not _smooth_loss(record) for record in records):
        return []
    goal = reached[0][1]
    parts = []
    for record in records:
        seconds = next((at for at, loss in _smooth_loss(record) if loss <= 1.01 * goal), None)
        parts.append(f"{record.name} {'never here' if seconds is None else f'after {seconds:.1f} s'}")
    return [f"within 1% of a training loss of {goal:.3g}: {', '.join(parts)}"]


def _smooth_loss(record: "RunRecord") -> list[tuple[float, float]]:
    """Return seconds and the mean loss of the last ten steps, from the tenth on."""
    known = [(step.seconds, step.loss) for step in record.steps if step.loss is not None]
    return [(known[end][0], sum(loss for _, loss in known[end - 9 : end + 1]) / 10) for end in range(9, len(known))]


def _elsewhere(records: "list[RunRecord]") -> list[str]:
    """Say what a network would change, for workers that had none: predicted from what was profiled."""
    from penstock.cli.check import described_by, predicted

    trace = next((record.trace for record in records if record.trace is not None), None)
    if trace is None:
        return []
    found = predicted(trace, described_by(records[0].workers, "1gbit"), "adamw", seconds=1.2)
    return ["nothing waits for a network here; at 1 Gb/s, predicted:", *(f"  {line}" for line in found.lines())]


def _merging() -> list[str]:
    """Say where merging alone pays, by simulation: many small gradients, and a network with long startups."""
    from penstock.cost.clusters import CLUSTERS
    from penstock.cost.ways import way_for
    from penstock.planners import PLANNERS
    from penstock.simulator.fitted import fitted_cost
    from penstock.simulator.iteration import predict
    from penstock.traces import load_shipped

    model, name, workers = MERGING
    way = way_for(CLUSTERS[name], "ring", workers, fitted_cost)
    trace = load_shipped(model)
    times = {each: predict(trace, PLANNERS[each], [way], workers).iteration_seconds for each in ("threshold", "exact")}
    gain = times["threshold"] / times["exact"]
    command = f"penstock plan {model} --network {name} --workers {workers}"
    return [
        f"merging alone: 1.02 times as fast as stock DDP's buckets in the median of 210 simulated settings; near its "
        f"most, {trace.model} on {workers} workers of {name}, {gain:.2f} times (by ring; `{command}`)"
    ]


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
