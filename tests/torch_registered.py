"""What each process does that trains with a codec whose operator it registers, as docs/language.md says."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.compll.operators import Operator, register
from penstock.plan import Bucket, Plan
from penstock.torch import DistributedDataParallel as OurDDP

WITH_OPERATOR = """
void encode(float* gradient, uint8* compressed) { compressed = concat(first_half(gradient)); }
void decode(uint8* compressed, float* gradient) { gradient = extract(compressed); }
"""
WITHOUT = WITH_OPERATOR.replace("first_half(gradient)", "gradient")
_KERNEL = """
def first_half(v):
    out = v.copy()
    out[v.size // 2:] = 0
    return out
"""


def first_half_of(vector: Any) -> Any:
    """Return the vector with its second half set to 0."""
    out = vector.copy()
    out[vector.size // 2 :] = 0
    return out


def train(rank: int, path: str) -> tuple[list[list[float]], str]:
    """Return the averaged gradient of each of two steps, and how it travelled."""
    triton = "def first_half(v):\n    out = v.clone()\n    out[v.numel() // 2:] = 0\n    return out\n"
    register(Operator("first_half", 1, 0, numpy=first_half_of, numba=_KERNEL, triton=triton))
    module = nn.Linear(8, 1, bias=False)
    plan = Plan("model", dist.get_world_size(), "given", (Bucket(("weight",), 32, "ring", path),))
    wrapper: Any = OurDDP(module, plan=plan)
    found = []
    for _ in range(2):
        wrapper.zero_grad(set_to_none=True)
        wrapper(torch.arange(1.0, 9.0) * (1 + rank)).backward()
        assert module.weight.grad is not None
        found.append(module.weight.grad.flatten().tolist())
    return found, ", ".join(str(route) for route in wrapper.routes_used())


def write(folder: Path) -> tuple[str, str]:
    """Return the files of the codec that calls the operator, and of the same without it."""
    paths = folder / "halved.cll", folder / "whole.cll"
    for path, text in zip(paths, (WITH_OPERATOR, WITHOUT), strict=True):
        path.write_text(text)
    return str(paths[0]), str(paths[1])
