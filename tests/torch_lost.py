"""Ranks of which one is killed while torch does something for us, for test_together.py."""

import os
import signal

import torch
import torch.distributed as dist

from penstock.errors import TransportError
from penstock.torch import DistributedDataParallel, comm_hook


def survive(rank: int, victim: int, phase: str) -> str:
    """Return what the wrapper raised when `victim` was killed before it was made, or before a later step."""
    model = torch.nn.Linear(4, 4)
    dist.barrier()
    try:
        if phase == "construction":
            _die(rank == victim)
            DistributedDataParallel(model)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        wrapped.register_comm_hook(*comm_hook("native"))
        for step in range(100):
            _die(rank == victim and step == 3)
            wrapped(torch.ones(2, 4)).sum().backward()
    except TransportError as error:
        return str(error)
    return "no error"


def _die(now: bool) -> None:
    if now:
        os.kill(os.getpid(), signal.SIGKILL)
