"""What a rank of PyTorch averages: the reference that other frameworks are compared with (`frameworks.py`)."""

import os

import numpy as np
import torch
import torch.distributed as dist

from adaptor.frameworks import BUCKETS, CASES, SHAPES, STEPS, digest, gradients, plan_of, report
from penstock.torch import DistributedDataParallel


class Echo(torch.nn.Module):
    """A model whose gradients are what it is given, in the order of the plan.

    Parameters are registered in that order too: torch's first iteration, which goes by it, then has the plan's buckets.
    """

    def __init__(self) -> None:
        super().__init__()
        for name in _planned():
            shape = SHAPES[name]
            self.register_parameter(name.replace("/", "_"), torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return a sum whose gradient is `given`; what was added last comes first in the backward pass."""
        return sum((getattr(self, name.replace("/", "_")) * given[name]).sum() for name in reversed(_planned()))


def _planned() -> list[str]:
    return [name for bucket in BUCKETS for name in bucket]


def averaged(case: str) -> list[str]:
    """Return a digest of what each step averages to."""
    plan, model = plan_of(case, dist.get_world_size()), Echo()
    buckets = tuple(
        type(bucket)(
            tuple(name.replace("/", "_") for name in bucket.tensors), bucket.nbytes, bucket.strategy, bucket.codec
        )
        for bucket in plan.buckets
    )
    wrapper = DistributedDataParallel(model, plan=type(plan)(plan.model, plan.workers, plan.planner, buckets))
    found = []
    for step in range(STEPS):
        model.zero_grad(set_to_none=True)
        given = {name: torch.from_numpy(each) for name, each in gradients(dist.get_rank(), step).items()}
        wrapper(given).backward()
        found.append(digest({name: _gradient(model, name) for name in SHAPES}))
        if step == 0:
            wrapper.exchange_state_dict()
    return found


def _gradient(model: Echo, name: str) -> np.ndarray:
    gradient = getattr(model, name.replace("/", "_")).grad
    return np.array(gradient.numpy())


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo")
    report(dist.get_rank(), bits={case: averaged(case) for case in CASES})
    dist.destroy_process_group()
