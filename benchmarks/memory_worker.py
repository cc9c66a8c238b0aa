"""One rank of `memory.py`: trains one model by one method in a fresh process and reports its peak.

A rank imports what a training script with that wrapper would: torch and a model, and penstock's wrapper only where it
trains with it. What reports the result is imported when the peak has been read.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.errors import PenstockError
from penstock.zoo import find_task
from penstock.zoo.task import first_batch

LEARNING_RATE = 1e-3
Wrap = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True, slots=True)
class MemoryJob:
    """What the ranks are asked to measure."""

    model: str  # a name of the zoo
    batch: int  # samples per rank
    method: str
    profile: int  # iterations that a planning method profiles
    iterations: int  # of them all: profiled, the first with new buckets, and a few more


def _stock(_: int) -> Wrap:
    from torch.nn.parallel import DistributedDataParallel

    return partial(DistributedDataParallel, gradient_as_bucket_view=True)


def _planned(profile: int, **options: Any) -> Wrap:
    from penstock.torch import DistributedDataParallel

    return partial(DistributedDataParallel, profile_iterations=profile, **options)


WRAPPERS: Mapping[str, Callable[[int], Wrap]] = {  # import what they wrap with when they are called
    "ddp-views": _stock,
    "penstock-exact": _planned,
    "penstock-exact-native": partial(_planned, strategy="native"),
    "penstock-ring": partial(_planned, strategy="ring"),
    "penstock-onebit": partial(_planned, codec="onebit"),
}


def find_wrapper(method: str) -> Callable[[int], Wrap]:
    """Return what imports the wrapper of a method, given the iterations to profile."""
    if method not in WRAPPERS:
        raise PenstockError(f"no method called {method!r}; wanted one of {', '.join(WRAPPERS)}")
    return WRAPPERS[method]


def measure_memory(job: MemoryJob) -> dict[str, int]:
    """Return the peak of the rank that needs most; every rank must call this with the same job.

    `imports_nbytes` is what its process held before the model was made: the interpreter, torch (with what it imports
    for any optimizer) and the wrapper.
    """
    torch.set_num_threads(1)
    task, wrap = find_task(job.model), find_wrapper(job.method)(job.profile)
    torch.optim.SGD([torch.zeros(1)], LEARNING_RATE)
    before = resident_nbytes("VmRSS")
    torch.manual_seed(1)
    model = wrap(task.model())
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    data = first_batch(task, job.batch, torch.device("cpu"))
    for _ in range(job.iterations):
        task.loss(model, data).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    found = [(0, 0)] * dist.get_world_size()
    dist.all_gather_object(found, (resident_nbytes("VmHWM"), before))
    peak, imports = max(found)
    return {"peak_nbytes": peak, "imports_nbytes": imports}


def resident_nbytes(field: str) -> int:
    """Return a size of this process as the kernel counts it: VmRSS is held now, VmHWM the most that ever was."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise AssertionError(f"no {field} in /proc/self/status")


def main() -> None:
    """Measure the job given as JSON on the command line, and let rank 0 report."""
    job = MemoryJob(**json.loads(sys.argv[-1]))
    dist.init_process_group("gloo")
    row = measure_memory(job)
    from penstock.bench.jobs import report

    report(dist.get_rank(), {"done": job.method})
    report(dist.get_rank(), row)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
