"""What ranks that share a GPU do in tests; the same on the CPU gives the bits to compare with.

As a script, what one rank of `penstock cluster run --gpus shared` does, over NCCL (`cpu`: over gloo):
python tests/torch_cuda.py cuda next_forward layers
"""

import hashlib
import os
import re
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torch_servers
from penstock.torch import BulkSynchronous, DistributedDataParallel, comm_hook, layered
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


def next_forward(rank: int, device: str, algorithm: str, options: dict[str, Any]) -> list[bytes]:
    """Return the weights after five steps whose gradients are exact; a GPU is behind all the time."""
    module = Weights().to(device)
    bsp = BulkSynchronous(module, partial(torch.optim.SGD, lr=0.5), algorithm, **options)
    rng = np.random.default_rng(rank)
    for _ in range(5):
        inputs = [torch.from_numpy(dyadic(rng, shape)).float().to(device) for shape in SHAPES]
        if device == "cuda":
            torch.cuda._sleep(20_000_000)  # cycles: copies and updates that are not waited for would be too early
        bsp(inputs).backward()
        bsp.step()
    bsp.close()
    return [each.detach().cpu().numpy().tobytes() for each in module.weights]


def next_forward_by_layers(rank: int, device: str, algorithm: str) -> list[Any]:
    """Return the weights of a model of several layers, trained in float64 by layers of their own."""
    layered.Split.least_nbytes = 0
    torch.manual_seed(0)
    sizes = ((64, 256), (256, 128), (128, 1))
    module = nn.Sequential(*(nn.Linear(*size, dtype=torch.float64) for size in sizes)).to(device)
    bsp = BulkSynchronous(module, partial(torch.optim.SGD, lr=0.01, momentum=0.9), algorithm)
    for step in range(6):
        inputs = torch.randn(8, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
        if device == "cuda":
            torch.cuda._sleep(5_000_000)
        bsp(inputs.to(device)).square().mean().backward()
        bsp.step()
    bsp.close()
    return [each.detach().cpu().numpy() for each in module.parameters()]


def served(rank: int, device: str, backend: str) -> list[bytes]:
    """Return what was applied by ranks that train beside a server, the last one, and by a resumed run."""
    found = torch_servers.conserved(rank, 1, {}, device, backend)
    return [b"served"] if found == "served" else [found["unbroken"], found["resumed"]]


def on_hosts(hosts: int, device: str, *arguments: str) -> list[str]:
    """Run this script on emulated hosts, which share the GPU if `device` is one; return a digest of each rank."""
    gpus = ("--gpus", "shared") if device == "cuda" else ()
    command = [sys.executable, "-m", "penstock", "cluster", "run", "--hosts", str(hosts), *gpus, "--"]
    result = subprocess.run(
        [*command, sys.executable, __file__, device, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    digests = dict(re.findall(r"rank (\d+): ([0-9a-f]{64})", result.stdout))
    return [digests[str(rank)] for rank in range(hosts)]


def digest(parts: list[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


if __name__ == "__main__":
    device, what, how = sys.argv[1:4]
    rank, nccl = int(os.environ["RANK"]), "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("gloo" if what == "served" else nccl)
    parts = served(rank, device, nccl) if what == "served" else next_forward(rank, device, how, {})
    print(f"rank {rank}: {digest(parts)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
