"""What profiling costs: iterations with the profiler's hooks beside iterations without, in turn.

Blocks of a few iterations alternate, so that a slow moment of the machine falls on both; each round gives one ratio,
and the overhead is the median of the ratios less one. Python's garbage collector is off while the clock runs, as in
`timeit`: it strikes at random and for longer than what is measured.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

from penstock.torch.clocks import device_name
from penstock.torch.profile import Profiler
from penstock.torch.profile_summary import spread
from penstock.zoo import find_task
from penstock.zoo.training import build, find_device, synchronise, training_step

CPU_MODELS = ("resnet20", "vgg16_cifar", "gpt_small")


def overhead_rows(
    models: Sequence[str], device: str = "auto", rounds: int = 24, block: int = 3, warmup: int = 5
) -> Iterator[dict[str, Any]]:
    """Measure each model of the zoo with its usual batch; rows come as they are measured."""
    for model in models:
        yield overhead_row(model, device, rounds, block, warmup)


def overhead_row(model_name: str, device_text: str, rounds: int, block: int, warmup: int) -> dict[str, Any]:
    """Return both iteration times, the overhead, and how the trace's own total compares with the clock on the wall."""
    device, task = find_device(device_text), find_task(model_name)
    model = build(task, device)
    step = training_step(task, model, task.batch, device)
    profiler = Profiler(warmup=0)

    def timed() -> float:
        synchronise(device)
        with collector_off():
            start = perf_counter()
            for _ in range(block):
                step()
            synchronise(device)
            return (perf_counter() - start) / block

    def profiled() -> float:
        with profiler.attached(model):
            return timed()

    for _ in range(warmup):
        step()
    plain, watched = _alternate((timed, profiled), rounds)
    ratios = [b / a for a, b in zip(plain, watched, strict=True)]
    return {
        "model": task.model,
        "device": device_name(device),
        "batch": task.batch,
        "tensors": len(list(model.parameters())),
        "iteration_seconds": median(plain),
        "profiled_iteration_seconds": median(watched),
        "overhead": median(ratios) - 1,
        "overhead_spread": spread(ratios),
        "trace_seconds": profiler.trace().compute_seconds,
    }


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep Python's garbage collector from running inside a `with` block."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _alternate(jobs: tuple[Callable[[], float], Callable[[], float]], rounds: int) -> tuple[list[float], list[float]]:
    """Run both jobs in each round, the order changing from round to round."""
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(rounds):
        for which in (0, 1) if index % 2 == 0 else (1, 0):
            times[which].append(jobs[which]())
    return times
