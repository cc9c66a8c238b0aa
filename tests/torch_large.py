"""What each process of a test with very large parameters does: one step through the wrapper, and report."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.plan import Bucket, Plan
from penstock.torch import DistributedDataParallel as OurDDP


class One(nn.Module):
    """One parameter, of which few elements are used."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel, dtype=dtype))

    def forward(self, places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return (self.weight[places] * values).sum()


def one_step(
    rank: int, numel: int, dtype: str, strategy: str, codec: str | None, places: list[int]
) -> tuple[list[float], int, str]:
    """Return the averaged gradient at some places, how many elements of it are not zero, and how it travelled."""
    module = One(numel, getattr(torch, dtype))
    bucket = Bucket(("weight",), module.weight.nbytes, strategy, codec)
    plan = Plan("model", dist.get_world_size(), "given", (bucket,))
    wrapper: Any = OurDDP(module, plan=plan)
    values = torch.full((len(places),), 1.0 + rank, dtype=module.weight.dtype)
    wrapper(torch.tensor(places), values).backward()
    gradient = module.weight.grad
    assert gradient is not None
    routes = ", ".join(str(each.route) for each in wrapper.routes_used())
    return gradient[places].float().tolist(), int(torch.count_nonzero(gradient)), routes
