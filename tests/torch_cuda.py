"""What ranks that share a GPU do in tests; the same on the CPU gives the bits to compare with."""

import hashlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from penstock.torch import DistributedDataParallel, comm_hook
from sparse_oracle import dyadic

SHAPES = ((3000,), (40, 50), (7,))


class Weights(nn.Module):
    """Parameters whose gradients are the inputs, to the bit."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])

    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(one * given).sum() for one, given in zip(self.weights, inputs, strict=True)]).sum()


def exchanged(rank: int, device: str, options: dict[str, Any], spoilt_step: int = -1) -> tuple[list[bytes], Any]:
    """Return the averaged gradients of three steps, and what this rank owes then."""
    module = Weights().to(device)
    sender, hook = comm_hook(**options, module=module)
    ddp = TorchDDP(module)
    ddp.register_comm_hook(sender, hook)
    rng, found = np.random.default_rng(rank), []
    for step in range(3):
        inputs = [torch.from_numpy(dyadic(rng, shape)).float().to(device) for shape in SHAPES]
        if step == spoilt_step and rank == 0:
            inputs[1][3, 4] = float("inf")
        ddp.zero_grad(set_to_none=True)
        ddp(inputs).backward()
        found += [one.grad.cpu().numpy().tobytes() for one in module.weights]
    owed = {name: values.numpy() for name, values in sender.exchange_state_dict()["memories"]["residual"].items()}
    return found, owed


def planned_over_nccl(rank: int, options: dict[str, Any]) -> tuple[str, str, float]:
    """Do the same in a group of NCCL; codecs send over gloo beside it."""
    return planned(rank, {**options, "process_group": dist.new_group(backend="nccl")})


def planned(rank: int, options: dict[str, Any]) -> tuple[str, str, float]:
    """Train with a plan on the GPU; return the weights' digest, what was decided, and how far the loss fell."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)).cuda()
    model = DistributedDataParallel(module, profile_iterations=2, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator("cuda").manual_seed(rank)
    losses = []
    for _ in range(30):
        inputs = torch.randn(32, 64, device="cuda", generator=generator)
        loss = (model(inputs).squeeze(1) - inputs[:, 0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest(), model.explain(), float(np.mean(losses[-5:]) / np.mean(losses[:5]))
