"""The iterations before the first step: the wrapper plans, torch settles its buckets, and computing alone is timed.

They use the first batch, update nothing, and leave no trace: buffers, random generators and residuals are put back. So
every step that counts runs with the buckets of all later ones, and a resumed run adds up in the same order as an
unbroken one.
"""

from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from penstock.torch.collective_errors import together
from penstock.train.method import Wrapped
from penstock.train.randomness import undisturbed
from penstock.zoo.task import Task

TIMED = 3  # iterations without communication


def settle(task: Task, wrapped: Wrapped, batch: Any, device: torch.device) -> float:
    """Bring the wrapper into its lasting state and return the seconds that computing alone takes, on the slowest rank.

    Computing alone is a forward and a backward pass under `no_sync`, on all ranks at once: they share what they share.
    """
    buffers = [buffer.clone() for buffer in wrapped.model.module.buffers()]
    owed: list[dict[str, Any] | None] = [None] * dist.get_world_size()
    with together("sharing what is owed", None):
        dist.all_gather_object(owed, wrapped.exchange_state())
    with undisturbed():
        for _ in range(wrapped.settling_iterations):
            _compute(task, wrapped, batch)
            wrapped.count_iteration()
        seconds = median(_alone_seconds(task, wrapped, batch, device) for _ in range(TIMED))
    wrapped.model.zero_grad(set_to_none=True)
    wrapped.load_exchange_states(owed)
    with torch.no_grad():
        for buffer, before in zip(wrapped.model.module.buffers(), buffers, strict=True):
            buffer.copy_(before)
    return slowest(seconds)


def _compute(task: Task, wrapped: Wrapped, batch: Any) -> None:
    wrapped.model.zero_grad(set_to_none=True)
    task.loss(wrapped.model, batch).backward()  # type: ignore[no-untyped-call]


def _alone_seconds(task: Task, wrapped: Wrapped, batch: Any, device: torch.device) -> float:
    with together("starting together", None):
        dist.barrier()
    start = perf_counter()
    with wrapped.model.no_sync():
        _compute(task, wrapped, batch)
    synchronise(device)
    return perf_counter() - start


def slowest(seconds: float) -> float:
    """Return the largest of all ranks' values."""
    box = torch.tensor([seconds], dtype=torch.float64)
    with together("sharing times", None):
        dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box)


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what was queued on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
