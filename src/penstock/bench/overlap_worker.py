"""One process of `penstock bench overlap`: trains a model of the zoo on a GPU by several methods in turn."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from penstock.bench.device_trace import summarise, watch
from penstock.bench.jobs import report
from penstock.runtime.device.messages import nccl_takes
from penstock.torch import DistributedDataParallel
from penstock.zoo import find_task
from penstock.zoo.training import build

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
            "model": task.model,
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


def _training(model: nn.Module, task: Any, batch: int, device: torch.device) -> Callable[[], None]:
    """Return a step: forward, backward with communication, update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, foreach=True)
    inputs, targets = task.make_batch(batch, device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        task.loss(model(inputs), targets).backward()
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


def main() -> None:
    """Measure the job given as JSON on the command line."""
    job = OverlapJob(**json.loads(sys.argv[1]))
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    by_nccl = nccl_takes(int(os.environ["LOCAL_WORLD_SIZE"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if by_nccl else "gloo")
    rank = dist.get_rank()
    report(rank, {"device": torch.cuda.get_device_name()})
    for row in measure(job, rank):
        report(rank, row)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
