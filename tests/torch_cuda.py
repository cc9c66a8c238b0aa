"""What ranks that share a GPU do in tests; the same on the CPU gives the bits to compare with.

As a script, what one rank of `penstock cluster run --gpus shared` does, over NCCL (`cpu`: over gloo):
python tests/torch_cuda.py cuda next_forward layers split
"""

import faulthandler
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
from penstock.codecs.graphs import urgent_stream
from penstock.codecs.registry import make_codec
from penstock.runtime import Communicator
from penstock.runtime.device.messages import device_messages
from penstock.runtime.transport.c10d import C10dTransport
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
    return exchanged_by(rank, device, options, spoilt_step)[1:]


def exchanged_by(
    rank: int, device: str, options: dict[str, Any], spoilt_step: int = -1
) -> tuple[Any, list[bytes], Any]:
    """Return the same with what sent them."""
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
    return sender, found, owed


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


SPARSE_OPTIONS = {"codec": "gtopk", "density": 0.01}
SPARSE_PARTS = (0, 700, 700, 701, 703, 300_000, 2_000_017)  # of a bucket: nothing, a scalar, some that are sent whole
SPARSE_CASES = [
    ("sparse(density=0.001)", "gtopk"),
    ("sparse(density=0.01, value_bits=16)", "gtopk"),
    ("sparse(density=0.001)", "gtopk_doubling"),
    ("sparse(density=0.05)", "gtopk_doubling"),
    ("sparse(density=0.01, value_bits=16)", "topk_allgather"),
    ("sparse(density=0.001)", "hierarchical(ranks_per_node=2, outer=gtopk)"),
]


def sparse(rank: int, device: str) -> list[bytes]:
    """Return what a rank's wrapper averaged with gTop-k, and what it owes; over NCCL, look that all was queued."""
    sender, averaged, owed = exchanged_by(rank, device, SPARSE_OPTIONS)
    if device == "cuda":
        parcels = [parcel for bucket, _ in sender._buckets.values() for parcel in bucket.parcels]
        assert [parcel.is_queued for parcel in parcels] == [True] * len(parcels) != []
    return [*averaged, *(owed[name].tobytes() for name in sorted(owed))]


def sparse_routes(rank: int) -> list[bytes]:
    """Return sums that were queued over NCCL, after a look that the route through the host gives their bits."""
    gloo, messages = dist.new_group(backend="gloo"), device_messages(dist.group.WORLD, 60.0)
    found = []
    for spec, strategy in SPARSE_CASES:
        communicator = Communicator(C10dTransport(gloo), timeout_seconds=60, messages=messages)
        by_host, queued = (sparse_sums(rank, communicator, spec, strategy, by_host) for by_host in (True, False))
        assert [one == other for one, other in zip(queued, by_host, strict=True)] == [True] * 5, (spec, strategy)
        found += queued[:-1]  # the last is the rank's own residual
    return found


def sparse_sums(rank: int, communicator: Communicator, spec: str, strategy: str, by_host: bool) -> list[bytes]:
    """Return the sums of four steps, in which graphs are captured and replayed, and the residual after them.

    In the last step a tensor of one rank holds infinity, and the sums of another overflow.
    """
    codec = make_codec(spec, rank, on_nonfinite="note", defers_nonfinite_check=True)
    stream, sums = urgent_stream(torch.device("cuda", 0)), []
    data, residual = torch.zeros(SPARSE_PARTS[-1], device="cuda"), torch.zeros(SPARSE_PARTS[-1], device="cuda")
    for step in range(4):
        values = torch.randn(SPARSE_PARTS[-1], generator=torch.Generator().manual_seed(10 * step + rank))
        if step == 3:
            values[1000], values[400_000] = float("inf") if rank == 1 else 1.0, 3e38
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            data.copy_(values)
            communicator.all_reduce(
                data, strategy, codec, residual, SPARSE_PARTS, scale=0.5 if step < 3 else 1.0, by_host=by_host
            )
        stream.synchronize()
        sums.append(torch.nan_to_num(data, nan=7.0).cpu().numpy().tobytes())
        assert bool(data.isnan().any()) == (step == 3)
    return [*sums, torch.nan_to_num(residual, nan=7.0).cpu().numpy().tobytes()]


def sparse_plan(rank: int) -> list[bytes]:
    """Return the weights that a wrapper trained by a plan of gTop-k."""
    weights, explained, fell = planned(rank, {"codec": "gtopk(density=0.05)"})
    assert "gtopk" in explained, explained
    assert fell < 0.9, explained
    return [weights.encode()]


HANGS_SECONDS = {"cpu": 200.0, "cuda": 60.0}  # after which a rank on a host is taken to hang


def on_hosts(hosts: int, device: str, what: str, *hows: str) -> dict[str, list[str]]:
    """Run this script on emulated hosts, which share the GPU if `device` is one; return each rank's digest, by `hows`.

    Standard error is not kept back: where a rank hangs, it says there where all of its threads are, and the run ends.
    """
    gpus = ("--gpus", "shared") if device == "cuda" else ()
    command = [sys.executable, "-m", "penstock", "cluster", "run", "--hosts", str(hosts), *gpus, "--"]
    result = subprocess.run(
        [*command, sys.executable, __file__, device, what, *hows],
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    found = {(how, int(rank)): each for rank, how, each in re.findall(r"rank (\d+), (\w+): (\w{64})", result.stdout)}
    return {how: [found[how, rank] for rank in range(hosts)] for how in hows}


def digest(parts: list[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def be_a_rank(device: str, what: str, *hows: str) -> None:
    """Do one thing in several ways and print a digest of each."""
    faulthandler.dump_traceback_later(HANGS_SECONDS[device], exit=True)
    rank, nccl = int(os.environ["RANK"]), "nccl" if device == "cuda" else "gloo"
    if device == "cuda" and what != "served":  # a server touches no GPU
        torch.cuda.set_device(0)
    dist.init_process_group("gloo" if what == "served" else nccl)
    roles = {
        "served": lambda _: served(rank, device, nccl),
        "next_forward": lambda how: next_forward(rank, device, how, {}),
        "sparse": lambda _: sparse(rank, device),
        "sparse_routes": lambda _: sparse_routes(rank),
        "sparse_plan": lambda _: sparse_plan(rank),
    }
    for how in hows:
        print(f"rank {rank}, {how}: {digest(roles[what](how))}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    be_a_rank(*sys.argv[1:])
