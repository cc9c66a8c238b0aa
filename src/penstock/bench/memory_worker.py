"""One rank of `penstock bench memory`: trains one model by one method in a fresh process and reports its peak."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.bench.serve import serve
from penstock.bench.train_methods import find_method
from penstock.runtime.reduce import merge_kernel
from penstock.runtime.transport import Transport
from penstock.zoo import find_task


@dataclass(frozen=True, slots=True)
class MemoryJob:
    """What the ranks are asked to measure."""

    model: str  # a name of the zoo
    batch: int  # samples per rank
    method: str
    profile: int  # iterations that a planning method profiles
    iterations: int  # of them all: profiled, the first with new buckets, and a few more


def measure_job(_: Transport, job: MemoryJob, done: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield the peak of the rank that needs most; every rank must call this with the same job.

    What the process holds before the model is made (interpreter, torch, penstock, compiled kernels) is not part of it:
    all methods import the same, so that it says nothing about them.
    """
    torch.set_num_threads(1)
    merge_kernel("float32")
    task, method = find_task(job.model), find_method(job.method)
    before = resident_nbytes("VmRSS")
    torch.manual_seed(1)
    trained = method.begin(task.build(), job.profile)
    inputs, targets = task.make_batch(job.batch, torch.device("cpu"))
    for _step in range(job.iterations):
        task.loss(trained.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        trained.update()
    found = [(0, 0)] * dist.get_world_size()
    dist.all_gather_object(found, (resident_nbytes("VmHWM") - before, before))
    peak, imports = max(found)
    done(job.method)
    yield {"peak_nbytes": peak, "imports_nbytes": imports}


def resident_nbytes(field: str) -> int:
    """Return a size of this process as the kernel counts it: VmRSS is held now, VmHWM the most that ever was."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise AssertionError(f"no {field} in /proc/self/status")


if __name__ == "__main__":
    serve(lambda document: MemoryJob(**document), measure_job)
