"""What `penstock check` measures with torch: a model's profile, and under a launcher real iterations of all workers."""

import os
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from penstock.errors import PlanError
from penstock.exchange.compression import Compression
from penstock.planning.candidates import candidates
from penstock.planning.choose import known_routes
from penstock.planning.worth import Worth, worth
from penstock.runtime.launch import torchrun_variables
from penstock.torch.ddp import DistributedDataParallel
from penstock.trace import Trace
from penstock.zoo import find_task
from penstock.zoo.run_task import build, find_device, profile_task, training_step

LEAST, MOST = 3, 20  # profiled iterations


def profiled(model: str, shape: tuple[int, ...], batch: int, device: str, seconds: float) -> Trace:
    """Profile a model for about so many seconds, on this machine."""
    task = find_task(model, shape)
    start = perf_counter()
    profile_task(task, device=device, batch=batch, iterations=1, warmup=1)
    once = (perf_counter() - start) / 2
    iterations = int(min(max(seconds / once, LEAST), MOST))
    return profile_task(
        task, device=device, batch=batch, iterations=iterations, warmup=1, source="penstock check"
    ).trace


def measured_worth(
    model: str, shape: tuple[int, ...], optimizer: str, batch: int, device: str, seconds: float
) -> Worth | None:
    """Train a few iterations with stock buckets on all workers, measure the network, and say what would pay.

    Every worker calls this; the first one gets the answer.
    """
    os.environ |= torchrun_variables(os.environ)
    place = find_device(device)
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        task = find_task(model, shape)
        module = build(task, place)
        device_ids = [place.index] if place.type == "cuda" else None
        wrapper = DistributedDataParallel(module, device_ids=device_ids, codec="auto", measure_seconds=seconds / 2)
        step = training_step(task, wrapper, batch or task.batch, place, None)
        stock_seconds = _until_planned(wrapper, step)
        decision = wrapper.decision
        if decision is None or decision.trace is None or decision.network is None:
            raise PlanError(f"no plan was made: {wrapper.explain()}")
        routes = candidates("auto", Compression(codec="auto").scheme(), "exact", _engine(place))
        known = known_routes(decision.network, routes, False)
        if dist.get_rank() != 0:
            return None
        return worth(decision.trace, decision.network, known, optimizer, stock_seconds)
    finally:
        dist.destroy_process_group()


def _until_planned(wrapper: DistributedDataParallel, step: Callable[[], None]) -> float:
    """Run iterations until there is a plan; return the median of those that torch's own buckets carried."""
    taken = []
    for _ in range(MOST):
        start = perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if wrapper.plan is not None:
            break
        taken.append(perf_counter() - start)
    return median(taken[1:] or taken)


def _engine(place: torch.device) -> str:
    return "nccl" if place.type == "cuda" else "gloo"
