"""What ranks do in tests of what ranks of a host exchange: weights and sums, directly and through a codec."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partialmethod
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from penstock.torch.fsdp.groups import CodedGather, CodedScatter, Direct, HostGather, HostScatter
from penstock.torch.fsdp.sharding import _held
from torch_fsdp import EVEN, Case, loss_of, made, mesh_of, native, ours, quick, train, weights


def exchanged_in_host(rank: int) -> dict[str, bool]:
    """Say where what is gathered and summed directly is what torch's own calls give."""
    group, found = dist.group.WORLD, {}
    assert group is not None
    ranks = group.size()
    for dtype, numel in ((torch.float32, 1000), (torch.bfloat16, 7)):
        generator = torch.Generator().manual_seed(rank)
        given = torch.randn(ranks * numel, generator=generator).to(dtype)
        everything = [torch.empty_like(given) for _ in range(ranks)]
        dist.all_gather(everything, given)
        gathered = torch.empty(ranks * numel, dtype=dtype)
        gathered[rank * numel :][:numel] = given[:numel]
        HostGather(DefaultAllGather())(gathered, gathered[rank * numel :][:numel], group)
        found[f"gathered {dtype}"] = torch.equal(gathered, torch.cat([each[:numel] for each in everything]))
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            scatter = HostScatter(DefaultReduceScatter(), ranks, numel, lambda *_: None, Direct(sums=True))
            values = scatter.allocate((ranks * numel,), dtype=dtype, device=torch.device("cpu"))
            output, theirs = (torch.empty(numel, dtype=dtype) for _ in range(2))
            scatter(output, values.copy_(given), group, op)
            dist.reduce_scatter_tensor(theirs, given, op=op)
            exact = torch.stack(everything).double().sum(0)[rank * numel :][:numel]
            exact = exact / ranks if op == dist.ReduceOp.AVG else exact
            near = torch.allclose(output.double(), exact, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)
            found[f"summed {dtype} {op}"] = near and (ranks > 2 or torch.equal(output, theirs))
    return found


def sent_in_fewer_bits(rank: int) -> dict[str, Any]:
    """Return how far gathers and sums by `blocks(bits=8)` are off, what was gathered, and where NaN arrives."""
    group, numel = dist.group.WORLD, 4096
    assert group is not None
    ranks = group.size()
    given = torch.randn(ranks * numel, generator=torch.Generator().manual_seed(rank))
    everything = [torch.empty_like(given) for _ in range(ranks)]
    dist.all_gather(everything, given)
    gathered, summed, spoilt = torch.empty(ranks * numel), torch.empty(numel), torch.empty(numel)
    gather, scatter = CodedGather("blocks(bits=8)"), CodedScatter("blocks(bits=8)")
    gather(gathered, given[:numel], group)
    scatter(summed, given, group, dist.ReduceOp.AVG)
    whole, average = torch.cat([each[:numel] for each in everything]), torch.stack(everything).mean(0)[rank * numel :]
    if rank == 1:
        given[5] = torch.nan  # of rank 0's part
    scatter(spoilt, given, group, dist.ReduceOp.AVG)
    return {
        "gathered off": float((gathered - whole).abs().max() / whole.abs().max()),
        "summed off": float((summed - average[:numel]).abs().max() / average.abs().max()),
        "gathered": gathered.numpy().tobytes(),
        "share of bytes": gather._payloads(1, numel).nbytes / (4 * numel),
        "nan arrives": bool(spoilt.isnan().any()),
    }


def trained_in_fewer_bits(rank: int) -> tuple[list[float], list[float]]:
    """Return losses of training with shards on two hosts, by torch's own and with a codec."""
    mesh, case = mesh_of((1, 2)), Case(EVEN, steps=20)
    models = [native(made(EVEN), mesh), ours(made(EVEN), mesh, shard_codec="blocks(bits=8)")]
    one, other = (train(each, rank, case) for each in models)
    return one, other


@dataclass(frozen=True)
class Behind:
    """What became of gradients that ranks of a replica sent in fewer bits, with weights as they were."""

    off: float  # how far what was applied and what is owed are from sums that numpy rounds, by element, at most
    largest: float  # of those sums
    rounded: float  # how far those are from sums that nobody rounds, at most
    owed: float  # by any element, at most
    losses: list[float]  # of later steps
    weights: list[Any]  # after them


def behind_a_shard_codec(rank: int, shape: tuple[int, int], codec: str | None) -> Behind:
    """Add up what was applied and is owed behind `blocks(bits=8)` inside a replica; numpy rounds the same gradients."""
    mesh, given = mesh_of(shape), dict[int, torch.Tensor]()
    asked = {"codec": codec, **quick(workers=shape[0], strategy="ring")} if codec else {}
    model = ours(made(), mesh, shard_codec="blocks(bits=8)", **asked)
    parameters = dict(model.named_parameters())
    applied = {name: torch.zeros_like(each.to_local(), dtype=torch.float64) for name, each in parameters.items()}
    rounded, exact = ({name: each.clone() for name, each in applied.items()} for _ in range(2))
    with patch.object(CodedScatter, "__call__", partialmethod(_noted, CodedScatter.__call__, given)):
        for step in range(6):
            model.zero_grad()
            loss_of(model, rank, step).backward()  # type: ignore[no-untyped-call]
            for wanted, rounds in ((rounded, True), (exact, False)):
                for name, part in _averaged_parts(model, mesh, given, rounds).items():
                    wanted[name] += part
            for name, each in model.named_parameters():
                applied[name] += each.grad.to_local()
    residuals = model.exchange_state_dict().get("residual", {})
    owed = {name: _summed(residuals[name].to_local()[0], mesh) if residuals else torch.zeros(1) for name in parameters}
    off = [float((rounded[name] - each - owed[name]).abs().max()) for name, each in applied.items() if each.numel()]
    lost = [float((rounded[name] - each).abs().max()) for name, each in exact.items() if each.numel()]
    most, owes = (max(float(each.abs().max()) for each in kind.values() if each.numel()) for kind in (rounded, owed))
    losses = train(model, rank, Case(steps=16, batches=2))
    return Behind(max(off), most, max(lost), owes, losses, weights(model))


def _noted(scatter: Any, call: Any, given: dict[int, Any], **arguments: Any) -> Any:
    """Keep what a rank gives to a reduce-scatter through a codec, then do it."""
    given[id(scatter)] = arguments["input_tensor"].clone()
    return call(scatter, **arguments)


def _averaged_parts(
    model: Any, mesh: DeviceMesh, given: Mapping[int, torch.Tensor], rounds: bool
) -> dict[str, torch.Tensor]:
    """Return this rank's part of each gradient's average; `rounds`: what others sent as numpy's `blocks(bits=8)`."""
    found, own, ranks = dict[str, torch.Tensor](), mesh.get_local_rank("shard"), mesh.size(1)
    for group in _held(model).averages.groups:
        values = given[id(group.of_torch._reduce_scatter_comm)]
        everyone = [torch.empty_like(values) for _ in range(ranks)]
        dist.all_gather(everyone, values, group=mesh.get_group("shard"))
        parts = [each.view(ranks, -1)[own].numpy() for each in everyone]
        read = [each if rank == own or not rounds else in_blocks_of_8_bits(each) for rank, each in enumerate(parts)]
        total = _summed(torch.from_numpy(np.mean(read, axis=0, dtype=np.float64)), mesh) / mesh.size(0)
        found |= {each.name: total[each.start :][: each.numel].view(each.shape) for each in group.shards}
    return found


def _summed(values: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the sum over replicas."""
    total = values.double().clone()
    dist.all_reduce(total, group=mesh.get_group("replicate"))
    return total


def in_blocks_of_8_bits(values: Any) -> Any:
    """Return what `blocks(bits=8)` makes of a vector: multiples of a bfloat16 step, 64 neighbours sharing one.

    >>> in_blocks_of_8_bits(np.array([128.0, 3.4, -126.6], np.float32)).tolist()
    [128.0, 3.0, -127.0]
    """
    found = np.empty_like(values)
    for start in range(0, len(values), 64):
        block = values[start : start + 64]
        largest = block[np.abs(block).argmax()]
        step = ((np.array([largest / 128], np.float32).view(np.uint32) + 65535) >> 16 << 16).view(np.float32)[0]
        codes = np.floor(block * (np.float32(1) / step) + np.float32(127.5)) if step else np.full_like(block, 127)
        found[start : start + 64] = (codes - 127) * step
    return found
