"""What `penstock check` measures with torch: a model's profile, and under a launcher real iterations of all workers.

There the network is measured and planned for as the wrapper does it; then stock DDP and the advised plan take turns, a
few iterations each, round after round: a slow moment of the machine falls on both, and shows as spread.
"""

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from penstock.errors import PlanError
from penstock.exchange.compression import AUTO, Compression
from penstock.plan import Plan
from penstock.planning.agree import from_rank_0
from penstock.planning.candidates import candidates
from penstock.planning.choose import Choice, at_least, known_routes
from penstock.planning.worth import OPTIMIZERS, Sample, Worth, worth
from penstock.runtime.launch import is_mpirun, torchrun_variables
from penstock.torch.buckets import TorchDDP
from penstock.torch.clocks import synchronise
from penstock.torch.collective_errors import GroupRanks
from penstock.torch.ddp import DistributedDataParallel
from penstock.torch.engines import MPI
from penstock.trace import Trace
from penstock.zoo import Task, find_task
from penstock.zoo.run_task import build, find_device, profile_task, training_step

LEAST, MOST = 3, 20  # profiled iterations
PROFILED, STEPS = 3, 3  # iterations that the wrapper profiles; optimizer's steps that are timed alone
MEASURE_SHARE = 0.4  # of the seconds: for the network and codecs
WARM, FEW, MANY = 2, 2, 10  # iterations of a round: untimed, and timed at least and at most
LEAST_ROUNDS, MOST_ROUNDS = 2, 5
LEARNING_RATE = 1e-4  # weights must stay finite
Engine = Literal["mpi"] | None
_MADE = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def profiled(
    model: str, shape: tuple[int, ...], optimizer: str, batch: int, device: str, seconds: float
) -> tuple[Trace, str, float]:
    """Profile a model for about so many seconds; return its trace, its optimizer's name and the step's seconds."""
    task, place = find_task(model, shape), find_device(device)
    start = perf_counter()
    found = profile_task(task, device=device, batch=batch, iterations=1, warmup=1, source="penstock check")
    once = (perf_counter() - start) / 2
    name, step_seconds = _step_seconds(task, optimizer, place)
    if LEAST * once < seconds:
        iterations = int(min(max(seconds / once, LEAST), MOST))
        found = profile_task(task, device=device, batch=batch, iterations=iterations, warmup=1, source="penstock check")
    return found.trace, name, step_seconds


def _step_seconds(task: Task, optimizer: str, place: torch.device) -> tuple[str, float]:
    """Return which optimizer was asked for, or is the task's own, and what a step of it takes."""
    module = build(task, place)
    updates = _optimizer(task, module, optimizer)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return optimizer or name_of(updates), median(_timed(updates.step, place) for _ in range(1 + STEPS))


def _optimizer(task: Task, module: nn.Module, name: str) -> torch.optim.Optimizer:
    """Return the optimizer of that name; the task's own where none is asked for, or one that is not torch's."""
    made = _MADE.get(name)
    return task.optimizer(module.parameters()) if made is None else made(module.parameters(), lr=LEARNING_RATE)


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """Return which of `OPTIMIZERS` an optimizer is, "other" where nothing is recorded about it."""
    name = type(optimizer).__name__.lower()
    return name if name in OPTIMIZERS else "other"


def _timed(run: Callable[[], object], place: torch.device) -> float:
    synchronise(place)
    start = perf_counter()
    run()
    synchronise(place)
    return perf_counter() - start


def measured_worth(
    model: str, shape: tuple[int, ...], optimizer: str, batch: int, device: str, seconds: float
) -> Worth | None:
    """Measure the network, plan, and time stock DDP and the plan in turns, all in about so many seconds.

    Every worker calls this; the first one gets the answer.
    """
    start = perf_counter()
    engine: Engine = MPI if is_mpirun(os.environ) and not device.startswith("cuda") else None
    os.environ |= torchrun_variables(os.environ)
    place = find_device(device)
    if place.type == "cuda":
        place, engine = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()), None
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        job = _Job(find_task(model, shape), optimizer, batch, place, engine)
        found = job.predicted(MEASURE_SHARE * seconds)
        plans = from_rank_0(lambda: _plans(found), job.ranks)
        stock, advised = job.measured(*plans, start + seconds)
        return None if found is None else replace(found, stock_sample=stock, advised_sample=advised)
    finally:
        dist.destroy_process_group()


class _Job:
    """One module that is trained by one wrapper after the other."""

    def __init__(self, task: Task, optimizer: str, batch: int, place: torch.device, engine: Engine) -> None:
        self._task, self._place, self._engine, self._batch = task, place, engine, batch or task.batch
        self._module = build(task, place)
        self._device_ids = [place.index] if place.type == "cuda" else None
        self._updates = _optimizer(task, self._module, optimizer)
        self._optimizer = optimizer or name_of(self._updates)
        self.ranks = GroupRanks(dist.group.WORLD)

    def predicted(self, seconds: float) -> Worth | None:
        """Train until there is a plan; return what may be expected of which, on the first worker."""
        offered = OPTIMIZERS[self._optimizer]
        wrapper = DistributedDataParallel(
            self._module,
            device_ids=self._device_ids,
            codec=AUTO,
            candidates=offered,
            engine=self._engine,
            measure_seconds=seconds,
            profile_iterations=PROFILED,
        )
        step, steps = self._step(wrapper), list[float]()
        while wrapper.plan is None and len(steps) < MOST:
            step()
            steps.append(_timed(self._updates.step, self._place))
        decision = wrapper.decision
        if decision is None or decision.trace is None or decision.network is None:
            raise PlanError(f"no plan was made: {wrapper.explain()}")
        if self.ranks.rank != 0:
            return None
        trace, network = decision.trace, decision.network
        engine = self._engine or ("gloo" if self._device_ids is None else "nccl")
        routes = candidates(AUTO, Compression(codec=AUTO, candidates=offered).scheme(), "exact", engine)
        bounds = at_least(Choice(trace, "exact", routes, auto=True), network)
        known = known_routes(network, routes)
        return worth(trace, network, known, self._optimizer, bounds, median(steps[1:] or steps), self._engine)

    def measured(self, stock: Plan, advised: Plan | None, end: float) -> tuple[Sample, Sample | None]:
        """Return what real iterations took, of stock DDP and as advised, round after round until `end`."""
        wraps = [partial(self._stock, stock), *([] if advised is None else [partial(self._planned, advised)])]
        rounds = [list[float]() for _ in wraps]
        each_seconds = min(1.0, (end - perf_counter()) / LEAST_ROUNDS / len(wraps))
        count = int(min(max(each_seconds / stock.iteration_seconds - WARM, FEW), MANY))
        count = self.ranks.from_first(count, "asking rank 0 how many iterations to time")
        for number in range(MOST_ROUNDS):
            for wrap, taken in zip(wraps, rounds, strict=True):
                taken.append(self._round(wrap(), count))
            on = number + 1 < LEAST_ROUNDS or perf_counter() < end
            if not self.ranks.from_first(on, "asking rank 0 whether to measure on"):
                break
        return _sample(rounds[0]), None if advised is None else _sample(rounds[1])

    def _stock(self, plan: Plan) -> nn.Module:
        """Return stock DDP; over MPI, which torch's own does not know, its messages by our wrapper."""
        return TorchDDP(self._module, device_ids=self._device_ids) if self._engine is None else self._planned(plan)

    def _planned(self, plan: Plan) -> nn.Module:
        return DistributedDataParallel(self._module, device_ids=self._device_ids, plan=plan, engine=self._engine)

    def _round(self, wrapper: nn.Module, count: int) -> float:
        """Return the median of so many iterations, after some that warm up."""
        step = self._step(wrapper)
        taken = [_timed(partial(self._iteration, step), self._place) for _ in range(WARM + count)]
        del step, wrapper
        gc.collect()  # a module has one wrapper at a time
        return median(taken[WARM:])

    def _iteration(self, step: Callable[[], None]) -> None:
        step()
        self._updates.step()

    def _step(self, wrapper: nn.Module) -> Callable[[], None]:
        return training_step(self._task, wrapper, self._batch, self._place, None)


def _plans(found: Worth | None) -> tuple[Plan, Plan | None]:
    """Return stock DDP's plan and what is advised beside it, on the first worker."""
    assert found is not None
    return found.stock, None if found.advised is found.stock else found.advised


def _sample(rounds: list[float]) -> Sample:
    middle = median(rounds)
    return Sample(middle, (max(rounds) - min(rounds)) / middle)
