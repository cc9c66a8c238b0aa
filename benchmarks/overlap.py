"""Compression beside the backward pass of a GPU: what it costs a step, and how much of it is hidden.

With one worker nothing is sent, so a step by our wrapper with a codec against the bare model is what wrapper and
compression cost; stock DDP beside it says how much of that is torch's own. Two workers share a GPU over gloo, which
shows that it works, not how fast two GPUs are: they take turns on it.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from device_trace import summarise, watch
from penstock.bench.jobs import Done, Output, report
from penstock.bench.record import make_record, save_record
from penstock.bench.training import parse_models
from penstock.cli.options import JsonOption, RecordOption, parse_counts
from penstock.cli.output import format_seconds, print_json, print_table, progress
from penstock.cluster.processes import run_workers
from penstock.cluster.worker_commands import loopback_workers
from penstock.errors import ClusterError, PenstockError
from penstock.runtime.device.messages import nccl_takes
from penstock.torch import DistributedDataParallel
from penstock.zoo import Task, find_task
from penstock.zoo.run_task import build
from penstock.zoo.task import first_batch
from study import RANK, Claim, claim_documents, start

TRACED = 3  # steps
COMPRESSED = ("penstock-onebit", "penstock-gtopk")
METHODS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "no-communication": lambda module: module,
    "ddp": lambda module: TorchDDP(module, gradient_as_bucket_view=True),
    "penstock": lambda module: DistributedDataParallel(module, profile_iterations=3),
    "penstock-onebit": lambda module: DistributedDataParallel(module, codec="onebit", profile_iterations=3),
    "penstock-gtopk": lambda module: DistributedDataParallel(
        module, codec="gtopk", density=0.001, profile_iterations=3
    ),
}
BARE, STOCK = "no-communication", "ddp"
_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class OverlapJob:
    """What to measure."""

    model: str  # of the zoo
    batch: int  # of each process
    rounds: int
    iterations: int  # of each method and round
    warmup: int


def measure(job: OverlapJob, rank: int) -> Iterator[dict[str, Any]]:
    """Train by each method in turn; yield a row for each."""
    task, device = find_task(job.model), torch.device("cuda", torch.cuda.current_device())
    models, steps = {}, {}
    for name, wrap in METHODS.items():
        torch.manual_seed(1)
        models[name] = wrap(build(task, device))
        steps[name] = _training(models[name], task, job.batch or task.batch, device)
        for _ in range(job.warmup):
            steps[name]()
        report(rank, {"done": name})
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    for _ in range(job.rounds):
        for name, step in steps.items():
            seconds[name].append(_timed(step, job.iterations))
    for name, step in steps.items():
        traced = summarise(watch(step, TRACED), TRACED)
        yield {
            "model": task.name,
            "batch": job.batch or task.batch,
            "workers": dist.get_world_size(),
            "method": name,
            "iteration_seconds": median(seconds[name]),
            "spread_seconds": max(seconds[name]) - min(seconds[name]),
            "all_seconds": seconds[name],
            **(traced if name in COMPRESSED else {"model_seconds": traced["model_seconds"]}),
            **_bucket_count(models[name]),
        }


def _bucket_count(model: nn.Module) -> dict[str, int]:
    plan = getattr(model, "plan", None)
    return {} if plan is None else {"buckets": len(plan.buckets)}


def _training(model: nn.Module, task: Task, batch: int, device: torch.device) -> Callable[[], None]:
    """Return a step: forward, backward with communication, update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, foreach=True)
    data = first_batch(task, batch, device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        task.loss(model, data).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _timed(step: Callable[[], None], iterations: int) -> float:
    """Return the seconds of a step, on the slowest rank."""
    torch.cuda.synchronize()
    dist.barrier()
    start = perf_counter()
    for _ in range(iterations):
        step()
    torch.cuda.synchronize()
    box = torch.tensor([(perf_counter() - start) / iterations], dtype=torch.float64)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box)


def train_rank() -> None:
    """Measure the job given as JSON on the command line, as one worker."""
    job = OverlapJob(**json.loads(sys.argv[-1]))
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    by_nccl = nccl_takes(int(os.environ["LOCAL_WORLD_SIZE"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if by_nccl else "gloo")
    rank = dist.get_rank()
    report(rank, {"device": torch.cuda.get_device_name()})
    for row in measure(job, rank):
        report(rank, row)
    dist.barrier()
    dist.destroy_process_group()


def overlap_rows(job: OverlapJob, workers: int, done: Done) -> tuple[str, list[dict[str, Any]]]:
    """Return the GPU's name and a row for each method, with so many workers on this machine."""
    output = Output(done)
    command = (sys.executable, __file__, RANK, json.dumps(asdict(job)))
    started = loopback_workers([command] * workers, {"OMP_NUM_THREADS": "4"})
    outcome = run_workers(started, output, timeout_seconds=_TIMEOUT_SECONDS)
    if outcome.exit_code:
        raise ClusterError(output.complaint(outcome.failed_rank, outcome.exit_code))
    device, *rows = output.results
    return device["device"], with_slowdown(rows)


def with_slowdown(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Say of each method how much longer it takes than the bare model, and than stock DDP.

    >>> rows = [{"method": "no-communication", "iteration_seconds": 1.0}, {"method": "ddp", "iteration_seconds": 2.0}]
    >>> rows = with_slowdown([*rows, {"method": "penstock-onebit", "iteration_seconds": 2.5}])
    >>> [(row["slowdown"], row["against_ddp"]) for row in rows]
    [(0.0, -0.5), (1.0, 0.0), (1.5, 0.25)]
    """
    seconds = {row["method"]: row["iteration_seconds"] for row in rows}
    return [
        {**row, "slowdown": own / seconds[BARE] - 1, "against_ddp": own / seconds[STOCK] - 1}
        for row, own in zip(rows, seconds.values(), strict=True)
    ]


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """Return what was asked: compressing slows a step without communication by less than 3%."""
    return [
        Claim(f"{row['method']}, {row['model']}, batch {row['batch']}, 1 worker: slowdown", row["slowdown"], 0.03, True)
        for row in rows
        if row["workers"] == 1 and row["method"] in COMPRESSED
    ]


def count_steps(workers: Sequence[int], models: int) -> int:
    """Return how often `done` will be called."""
    return len(workers) * models * len(METHODS)


def overlap(
    models: Annotated[
        str, typer.Option(help="names of the zoo with batches")
    ] = "vgg16_cifar:256,vgg16_cifar:2048,resnet50:256",
    workers: Annotated[str, typer.Option(help="numbers of workers; they share the GPU")] = "1,2",
    rounds: Annotated[int, typer.Option(help="of all methods in turn", min=1)] = 7,
    iterations: Annotated[int, typer.Option(help="of each method and round", min=1)] = 10,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Train on a GPU with and without a codec in turn; say what that costs, and what of it is hidden."""
    found, sizes = parse_models(models), parse_counts(workers, "--workers")
    if not torch.cuda.is_available():
        raise PenstockError("overlap: torch sees no GPU here; it measures kernels on one")
    rows, device = [], ""
    with progress("methods", count_steps(sizes, len(found))) as done:
        for model, batch in found:
            for size in sizes:
                device, some = overlap_rows(OverlapJob(model, batch, rounds, iterations, 12), size, done)
                rows += some
                if out:  # what is measured is kept, whatever comes after
                    save_record(make_record("overlap", rows, device=device, claims=claim_documents(claims(rows))), out)
    if json:
        print_json(rows)
        return
    table = [
        (
            row["model"], row["batch"], row["workers"], row["method"], format_seconds(row["iteration_seconds"]),
            f"{row['slowdown']:+.1%}", f"{row['against_ddp']:+.1%}",
            format_seconds(row["codec_seconds"]) if "codec_seconds" in row else "-",
            f"{row['hidden']:.0%}" if row.get("hidden") is not None else "-",
        )
        for row in rows
    ]  # fmt: skip
    columns = ("model", "batch", "workers", "method", "iteration", "slowdown", "against ddp", "codec kernels", "hidden")
    print_table(f"compression beside the backward pass on {device}", columns, table, note="medians, measured")


if __name__ == "__main__":
    start(overlap, train_rank)
