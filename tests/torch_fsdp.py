"""What ranks do in tests of sharded training; `native` is torch's own HSDP."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils.checkpoint import checkpoint

from penstock.errors import PenstockError
from penstock.network import LinearCost, Network
from penstock.plan import Plan, save_plan
from penstock.torch import DistributedDataParallel as OurDDP
from penstock.torch import fully_shard_with
from penstock.torch.fsdp.groups import CodedGather, CodedScatter, Direct, HostGather, HostScatter
from penstock.torch.fsdp.sharding import _held
from penstock.torch.optim import CompressedAdamW

NAMES = ("replicate", "shard")
ROUTES = ("native", "ring", "ring+blocks(bits=4)", "ring+onebit", "ring+bf16")


@dataclass(frozen=True)
class Sizes:
    """A model: `width` and `inside` say whether shards are padded on two ranks."""

    width: int = 7
    inside: int = 13
    outputs: int = 5
    tokens: int = 11
    scaled: bool = True  # each layer has a parameter of one element
    layers: int = 3
    calls: int = 1  # of each layer, in a pass
    skips: bool = False  # the second layer in odd passes, and the last layer's scale in all
    recomputes: bool = False  # activations of layers


EVEN = Sizes(8, 16, 6, 12, scaled=False)


class Block(nn.Module):
    """A layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(sizes.width, sizes.inside), nn.Linear(sizes.inside, sizes.width)
        self.scale = nn.Parameter(torch.ones(1)) if sizes.scaled else None

    def forward(self, values: torch.Tensor, scaled: bool = True) -> torch.Tensor:
        found = self.down(torch.tanh(self.up(values)))
        return values + (found if self.scale is None or not scaled else self.scale * found)


class Model(nn.Module):
    """Layers between an input that is looked up and an output."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, self.passes = sizes, 0
        self.table = nn.Embedding(sizes.tokens, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.out = nn.Linear(sizes.width, sizes.outputs)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        values, sizes = self.table(tokens), self.sizes
        self.passes += 1
        for index, block in enumerate(self.blocks):
            if sizes.skips and index == 1 and self.passes % 2:
                continue
            for _ in range(sizes.calls):
                arguments = (values, not (sizes.skips and index == 2))
                values = checkpoint(block, *arguments, use_reentrant=False) if sizes.recomputes else block(*arguments)
        found: torch.Tensor = self.out(values)
        return found


@dataclass(frozen=True)
class Case:
    """A training by torch's own and by ours."""

    sizes: Sizes = Sizes()
    torch: Mapping[str, Any] = field(default_factory=dict)  # options of both
    ours: Mapping[str, Any] = field(default_factory=dict)
    accumulate: int = 1  # passes before a step
    by: str = "set_requires_gradient_sync"  # what is off in all of them but the last; "": nothing
    to_none: bool = True  # gradients are set to None after a step
    clip: float | None = None
    in_backward: bool = False  # the optimizer steps as gradients come
    freezes: bool = False  # the first layer
    steps: int = 6
    batches: int = 1_000_000  # that differ, before they come again

    @property
    def is_offloaded_from_gpu(self) -> bool:
        """Whether weights and gradients are in pinned memory."""
        return getattr(self.torch.get("offload_policy"), "pin_memory", False)


def network(workers: int) -> Network:
    """Return a network for tests that do not measure."""
    return Network(workers, 1e-4, 1e-9, 1e-10, dict.fromkeys(ROUTES, LinearCost(1e-4, 1e-9)))


def quick(planner: str = "exact", workers: int = 2, **options: Any) -> dict[str, Any]:
    """Return options that neither measure nor profile for long."""
    return {"planner": planner, "network": network(workers), "profile_iterations": 2, "measure_seconds": 0.5, **options}


def by_columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 else None


RING = quick(strategy="ring")
BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
BF16_SUMS = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
FP16_SUMS = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16)}
COLUMNS = {"shard_placement_fn": by_columns}
LATER = "set_requires_all_reduce"

CASES: dict[str, Case] = {
    "as torch sends": Case(),
    "bf16 with accumulation": Case(torch=BF16, accumulate=2),
    "50 steps in bf16 with accumulation": Case(torch=BF16, accumulate=2, steps=50),
    "50 steps in bf16 with accumulation, by our ring": Case(EVEN, torch=BF16, ours=RING, accumulate=2, steps=50),
    "one message a layer, by our ring": Case(ours=quick("wfbp", strategy="ring", bulk=False)),
    "one message a layer, those in bulks": Case(ours=quick("wfbp", strategy="ring")),
    "one message for all": Case(ours=quick("single", strategy="ring")),
    "torch's all-reduce of one message": Case(ours=quick("single", strategy="native")),
    "gradients in buckets": Case(EVEN, ours=RING),
    "gradients in buckets, kept after a step": Case(EVEN, ours=RING, to_none=False),
    "gradients in one bucket, kept after a step": Case(EVEN, ours=quick("single", strategy="ring"), to_none=False),
    "padded shards, kept after a step": Case(ours=RING, to_none=False),
    "accumulation without messages": Case(EVEN, ours=RING, accumulate=3),
    "accumulation with messages": Case(EVEN, ours=RING, accumulate=3, by=""),
    "accumulation with messages as torch sends": Case(accumulate=3, by=""),
    "accumulation inside hosts": Case(EVEN, ours=RING, accumulate=3, by=LATER),
    "accumulation inside hosts as torch sends": Case(accumulate=3, by=LATER),
    "bf16, sums in fp32": Case(EVEN, torch=BF16, ours=RING),
    "bf16, sums in bf16": Case(EVEN, torch=BF16_SUMS, ours=RING),
    "bf16, sums in bf16, padded, accumulated": Case(torch=BF16_SUMS, ours=RING, accumulate=2, by=""),
    "fp16": Case(torch=FP16_SUMS, ours=RING),
    "fp16 as torch sends": Case(torch=FP16_SUMS),
    "clipping": Case(ours=RING, clip=0.1),
    "weights kept after forward": Case(torch={"reshard_after_forward": False}, ours=RING),
    "activation checkpointing": Case(Sizes(recomputes=True), ours=RING),
    "a layer that is called twice": Case(Sizes(calls=2), ours=RING),
    "a layer that is called twice, as torch sends": Case(Sizes(calls=2)),
    "layers without gradients": Case(Sizes(skips=True), ours=quick("single", strategy="ring")),
    "a frozen layer": Case(ours=RING, freezes=True),
    "cut by columns": Case(EVEN, torch=COLUMNS, ours=RING),
    "an optimizer that steps in backward": Case(EVEN, ours=RING, in_backward=True),
    "CPU offload": Case(EVEN, torch={"offload_policy": CPUOffloadPolicy(pin_memory=False)}, ours=RING),
}
THREE = {
    "as torch sends": Case(),
    "bf16, sums in bf16, accumulated": Case(torch=BF16_SUMS, by="", accumulate=2),
}
KEEP = {"reshard_after_forward": False}
CODED: dict[str, Case] = {  # with a codec; clipped in any case
    "padded shards": Case(),
    "gradients in buckets": Case(EVEN),
    "gradients kept after a step": Case(EVEN, to_none=False),
    "bf16, sums in fp32": Case(EVEN, torch=BF16),
    "bf16, sums in bf16": Case(torch=BF16_SUMS),
    "accumulation without messages": Case(EVEN, accumulate=2),
    "accumulation with messages": Case(accumulate=2, by=""),
    "accumulation inside hosts": Case(EVEN, accumulate=2, by=LATER),
    "weights kept after forward": Case(EVEN, torch=KEEP),
    "activation checkpointing": Case(Sizes(recomputes=True)),
    "all of it": Case(Sizes(recomputes=True), torch=BF16 | KEEP, accumulate=2),
    "cut by columns": Case(EVEN, torch=COLUMNS),
    "CPU offload": Case(EVEN, torch={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "a frozen layer": Case(freezes=True),
    "a layer that is called twice": Case(Sizes(calls=2)),
    "layers without gradients": Case(Sizes(skips=True)),
}


@cache
def mesh_of(shape: tuple[int, int], device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, shape, mesh_dim_names=NAMES)


def made(sizes: Sizes = Sizes(), freezes: bool = False) -> Model:  # noqa: B008  # a frozen value
    torch.manual_seed(0)
    model = Model(sizes)
    if freezes:
        model.blocks[0].requires_grad_(False)
    return model


def native(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
    """Return torch's own HSDP of a model."""
    for each in model.blocks:  # type: ignore[union-attr]
        fully_shard(each, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def ours(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
    return fully_shard_with(model, mesh, layers=Block, **options)


def loss_of(model: Any, rank: int, step: int, device: str = "cpu") -> torch.Tensor:
    """Return the loss of a batch that differs by rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(model.sizes.tokens, (12,), generator=generator)
    wanted = torch.randint(model.sizes.outputs, (12,), generator=generator)
    return nn.functional.cross_entropy(model(tokens.to(device)).float(), wanted.to(device))


def weights(model: nn.Module) -> list[Any]:
    """Return all parameters, whole, as arrays."""
    return [whole(each).numpy().copy() for each in model.parameters()]


def whole(value: Any) -> Any:
    """Return a DTensor, whole, in host memory; whatever else there is as it is."""
    if not isinstance(value, DTensor):
        return value
    there = value.detach().to(value.device_mesh.device_type)  # what was offloaded, too, is gathered by the mesh
    return there.full_tensor().cpu()


def same(first: list[Any], second: list[Any]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)


def train(
    model: Any, rank: int, case: Case, device: str = "cpu", by: torch.optim.Optimizer | None = None
) -> list[float]:
    """Train by AdamW, or by an optimizer that has stepped before; return the loss of each step."""
    optimizer = by or adamw(model)
    if case.in_backward:
        step_in_backward(model)
    losses = []
    for step in range(case.steps):
        for part in range(case.accumulate):
            if case.by:
                getattr(model, case.by)(part == case.accumulate - 1)
            loss = loss_of(model, rank, (step * case.accumulate + part) % case.batches, device)
            (loss / case.accumulate).backward()  # type: ignore[no-untyped-call]
        if case.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        if not case.in_backward:
            optimizer.step()
            optimizer.zero_grad(set_to_none=case.to_none)
        losses.append(float(loss.detach()))
    return losses


def step_in_backward(model: nn.Module) -> None:
    """Step each parameter as soon as torch has written its gradient."""

    def step(parameter: Any) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]


def compared(rank: int, mesh: DeviceMesh, case: Case) -> str:
    """Train by torch's own and by ours; say what differs."""
    device = mesh.device_type
    models = [
        native(made(case.sizes, case.freezes).to(device), mesh, **case.torch),
        ours(made(case.sizes, case.freezes).to(device), mesh, **case.torch, **case.ours),
    ]
    losses = [train(each, rank, case, device) for each in models]
    if not same(*map(weights, models)):
        return f"weights differ after losses {losses}"
    if case.ours and not case.in_backward and models[1].plan is None:
        return "no plan"
    return "" if losses[0] == losses[1] else f"losses {losses}"


def every_case(rank: int, shape: tuple[int, int], cases: Mapping[str, Case], device: str = "cpu") -> dict[str, str]:
    """Return what differs in each case."""
    mesh, found = mesh_of(shape, device), {}
    for name, case in cases.items():
        try:
            found[name] = compared(rank, mesh, case)
        except PenstockError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


# Codecs: what is applied and what is owed are the gradients.


@dataclass(frozen=True)
class Kept:
    """What became of the gradients of some iterations in which weights stayed as they were."""

    off: float  # how far what was applied and what is owed are from torch's own gradients, by element, at most
    owed: float  # by any element, at most
    norm_off: float  # how far the norm that clipping found is from that of the applied gradients, and that after it
    is_planned: bool
    weights: list[Any]  # after steps with clipped gradients

    def wrong(self, in_16_bits: bool = False, is_coarse: bool = True) -> str:
        """Say what was lost; `in_16_bits`: torch rounds its averages; `is_coarse`: the codec owes something for sure.

        >>> Kept(off=0.0, owed=0.1, norm_off=1e-3, is_planned=True, weights=[]).wrong()
        'the norm is off by 0.001'
        """
        most, most_of_norm = (2e-2, 1e-2) if in_16_bits else (1e-6, 1e-4)  # torch adds up a million squares in float32
        checks = {
            f"gradients are off by {self.off:.3g}": not self.off < most,
            f"at most {self.owed:.3g} is owed": not self.owed > (1e-4 if is_coarse else 0.0),
            f"the norm is off by {self.norm_off:.3g}": not self.norm_off < most_of_norm,
            "no plan": not self.is_planned,
        }
        return ", ".join(text for text, is_wrong in checks.items() if is_wrong)


def conserved(
    rank: int,
    shape: tuple[int, int],
    codec: str,
    cases: Mapping[str, Case],
    compiles: bool = False,
    device: str = "cpu",
) -> dict[str, Kept]:
    """Return what became of the gradients in each case, beside torch's own."""
    mesh = mesh_of(shape, device)
    return {name: kept(rank, mesh, codec, case, compiles) for name, case in cases.items()}


def kept(rank: int, mesh: DeviceMesh, codec: str, case: Case, compiles: bool = False) -> Kept:
    """Return what became of the gradients in one case, beside torch's own."""
    device, options = mesh.device_type, quick(workers=mesh.size(0), strategy="ring")
    one = native(made(case.sizes, case.freezes).to(device), mesh, **case.torch)
    other = ours(made(case.sizes, case.freezes).to(device), mesh, codec=codec, **options, **case.torch)
    return _kept(rank, case, one, other, compiles)


def _kept(rank: int, case: Case, one: Any, other: Any, compiles: bool) -> Kept:
    wanted, applied = (_gradients(rank, case, each, compiles) for each in (one, other))
    residuals = other.exchange_state_dict()["residual"]
    owed = [whole(residuals[name]).double().sum(0).numpy() for name, _ in _trained(other)]
    off = max(float(np.abs(w - a - r).max()) for w, a, r in zip(wanted, applied, owed, strict=True))
    norm_off, optimizer = 0.0, torch.optim.AdamW(other.parameters(), lr=0.01)
    for step in range(2):
        last = _accumulated(rank, case, other, step)
        if not case.is_offloaded_from_gpu:  # NCCL sums no norms of what is in host memory
            norm_off = max(norm_off, _norm_off(other, last))
        optimizer.step()
        other.zero_grad()
    return Kept(off, max(float(np.abs(each).max()) for each in owed), norm_off, other.plan is not None, weights(other))


def _norm_off(model: Any, gradients: list[Any]) -> float:
    """Clip to half the norm; return how far the norm that was found, and that afterwards, are off."""
    before = float(np.sqrt(sum(float((each**2).sum()) for each in gradients)))
    told = nn.utils.clip_grad_norm_(model.parameters(), 0.5 * before).full_tensor()  # type: ignore[attr-defined]
    after = float(np.sqrt(sum(float((each**2).sum()) for each in _whole_gradients(model))))
    wanted = 0.5 * before / (1 + 1e-6 / before)  # torch adds that much to the norm, to divide by it
    return max(abs(float(told) / before - 1), abs(after / wanted - 1))


def _gradients(rank: int, case: Case, model: Any, compiles: bool) -> list[Any]:
    """Return the sum of all gradients of six iterations, whole; weights stay as they are."""
    called = torch.compile(model, backend="aot_eager") if compiles else model
    total: list[Any] = [0.0] * len(_trained(model))
    for step in range(6):
        total = [sum(each) for each in zip(total, _accumulated(rank, case, called, step), strict=True)]
        model.zero_grad(set_to_none=case.to_none)
    return total


def _accumulated(rank: int, case: Case, model: Any, step: int) -> list[Any]:
    """Return the gradients of one iteration, whole."""
    for part in range(case.accumulate):
        if case.by:
            getattr(model, case.by)(part == case.accumulate - 1)
        device = next(iter(model.parameters())).device_mesh.device_type
        loss_of(model, rank, step * case.accumulate + part, device).backward()  # type: ignore[no-untyped-call]
    return _whole_gradients(model)


def _whole_gradients(model: Any) -> list[Any]:
    return [
        np.zeros(each.shape) if each.grad is None else whole(each.grad).double().numpy() for _, each in _trained(model)
    ]


def _trained(model: Any) -> list[tuple[str, Any]]:
    """Return the parameters that are trained, with their names; without those that torch.compile adds to them."""
    named = getattr(model, "_orig_mod", model).named_parameters()
    return [(name, each) for name, each in named if each.requires_grad]


def alike(rank: int, shape: tuple[int, int], options: dict[str, Any]) -> tuple[list[float], list[Any], str]:
    """Train with a codec; return losses, weights and what is explained."""
    model = ours(made(), mesh_of(shape), **options)
    losses = train(model, rank, Case(steps=10, clip=1.0))
    return losses, weights(model), model.explain(picture=True)


# State: saved on one mesh, loaded on another.


Optimizer = Callable[[Any], torch.optim.Optimizer]  # of a model


def compressed_adamw(model: Any, warmup_steps: int) -> torch.optim.Optimizer:
    return CompressedAdamW(model.parameters(), lr=0.01, ddp=model, warmup_steps=warmup_steps)


def save_state(
    rank: int, shape: tuple[int, int], folder: str, options: dict[str, Any], make: Optimizer = adamw
) -> dict[Any, Any]:
    """Train, save with torch.distributed.checkpoint, train on; return all state when it was saved, and weights then."""
    model = ours(made(), mesh_of(shape), **options)
    optimizer = make(model)
    train(model, rank, Case(steps=8), by=optimizer)
    dcp.save(saved(model, optimizer, model.exchange_state_dict()), checkpoint_id=folder)
    if rank == 0:
        save_plan(model.plan, f"{folder}.plan")
    found = whole_state(model, optimizer)
    train(model, rank, Case(steps=4), by=optimizer)
    return found | later_state(model, optimizer)


def load_state(
    rank: int, shape: tuple[int, int], folder: str, options: dict[str, Any], make: Optimizer = adamw
) -> dict[Any, Any]:
    """Load on this mesh, train on; return all state when it was loaded, and weights in the end."""
    model = ours(made(), mesh_of(shape), **options)
    optimizer = make(model)
    state = saved(model, optimizer, model.exchange_state_to_load(folder))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    model.load_exchange_state_dict(state["exchange"])
    found = whole_state(model, optimizer)
    train(model, rank, Case(steps=4), by=optimizer)
    return found | later_state(model, optimizer)


def saved(model: Any, optimizer: torch.optim.Optimizer, exchange: dict[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint holds."""
    weights_, moments = get_state_dict(model, optimizer)
    return {"model": weights_, "optimizer": moments, "exchange": exchange}


def whole_state(model: Any, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return weights, moments and what all replicas owe, whole, by kind and parameter."""
    exchange = model.exchange_state_dict()
    found: dict[Any, Any] = {("iterations",): exchange["iterations"]}
    for name, parameter in model.named_parameters():
        kinds = {"weight": parameter} | optimizer.state[parameter]
        kinds |= {kind: exchange[kind][name] for kind in ("residual", "velocity") if kind in exchange}
        found |= {(kind, name): np.array(whole(value)) for kind, value in kinds.items()}
    return found


def later_state(model: Any, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return weights and second moments at the end."""
    squares = [whole(optimizer.state[each]["exp_avg_sq"]).numpy().copy() for each in model.parameters()]
    return {("later", "weights"): weights(model), ("later", "squares"): squares}


# What goes wrong.


def refused(rank: int, wrong: str) -> str:
    """Return what is raised on this rank."""
    mesh = mesh_of((2, 2))
    try:
        WRONG[wrong](rank, mesh)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def every_refusal(rank: int, names: list[str]) -> dict[str, str]:
    return {name: refused(rank, name) for name in names}


def _sharded_on_the_whole(rank: int, mesh: DeviceMesh) -> None:
    model = made()
    fully_shard(model.blocks[0], mesh=mesh)
    fully_shard_with(model, mesh)


def _hooked(rank: int, mesh: DeviceMesh) -> None:
    model: Any = fully_shard(made(), mesh=mesh["shard"])
    model.set_all_reduce_hook(print)
    fully_shard_with(model, mesh)


def _with_a_name(rank: int, mesh: DeviceMesh) -> None:
    model = made()
    model.plan = 3
    fully_shard_with(model, mesh)


def _nan(rank: int, mesh: DeviceMesh) -> None:
    model = ours(made(), mesh, codec="blocks(bits=4)", **quick(strategy="ring"))
    for step in range(6):
        loss = loss_of(model, rank, step)
        (loss * (float("nan") if step == 4 and rank == 3 else 1.0)).backward()  # type: ignore[no-untyped-call]


def _foreign_state(rank: int, mesh: DeviceMesh) -> None:
    model = ours(made(), mesh, codec="blocks(bits=4)")
    state = model.exchange_state_dict()
    if rank == 1:
        state["residual"]["nothing"] = state["residual"].pop("out.bias")
    model.load_exchange_state_dict(state)


def _offloaded_momentum(rank: int, mesh: DeviceMesh) -> None:
    """Give the optimizer parameters in host memory, of a mesh of GPUs: what CPUOffloadPolicy makes of them there."""
    model, gpus = ours(made(), mesh, codec="blocks(bits=4)"), DeviceMesh("cuda", mesh.mesh, _init_backend=False)
    offloaded = [
        DTensor(each.to_local(), DTensorSpec(gpus, (Replicate(),) * 2, each._spec.tensor_meta), requires_grad=False)
        for each in model.parameters()
    ]
    CompressedAdamW(offloaded, ddp=model, warmup_steps=2)


WRONG: dict[str, Callable[[int, DeviceMesh], Any]] = {
    "one dimension": lambda rank, mesh: fully_shard_with(made(), mesh["shard"]),
    "no mesh": lambda rank, mesh: fully_shard_with(made(), None),  # type: ignore[arg-type]
    "no names": lambda rank, mesh: fully_shard_with(made(), DeviceMesh("cpu", mesh.mesh)),
    "other options": lambda rank, mesh: fully_shard_with(made(), mesh, codec="onebit" if rank == 3 else "terngrad"),
    "other models": lambda rank, mesh: fully_shard_with(made(Sizes(width=8 if rank == 2 else 7)), mesh),
    "other reshard": lambda rank, mesh: fully_shard_with(made(), mesh, reshard_after_forward=rank == 1),
    "unknown": lambda rank, mesh: fully_shard_with(made(), mesh, bucket_cap_mb=3),
    "clip": lambda rank, mesh: fully_shard_with(made(), mesh, codec="topk", clip=1.0),
    "twice": lambda rank, mesh: fully_shard_with(fully_shard_with(made(), mesh), mesh),
    "sharded on the whole mesh": _sharded_on_the_whole,
    "a hook": _hooked,
    "a name": _with_a_name,
    "other names": lambda rank, mesh: fully_shard_with(
        made(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "gpu") if rank == 3 else NAMES)
    ),
    "layers": lambda rank, mesh: fully_shard_with(made(), mesh, layers=3),  # type: ignore[arg-type]
    "a sparse shard codec": lambda rank, mesh: fully_shard_with(made(), mesh, shard_codec="topk"),
    "a shard codec in bf16": lambda rank, mesh: fully_shard_with(made(), mesh, shard_codec="blocks(bits=8)", **BF16),
    "other shard codecs": lambda rank, mesh: fully_shard_with(
        made(), mesh, shard_codec=f"blocks(bits={4 if rank == 3 else 8})"
    ),
    "offloaded momentum": _offloaded_momentum,
    "nan": _nan,
    "foreign state": _foreign_state,
}


def survive(rank: int, victim: int) -> str:
    """Return what training raises when `victim` was killed."""
    model = ours(made(), mesh_of((2, 2)), codec="blocks(bits=4)", **quick(strategy="ring"))
    try:
        for step in range(100):
            if rank == victim and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            loss_of(model, rank, step).backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def each_of(rank: int, names: list[str]) -> dict[str, Any]:
    """Return what some functions of this file do on a rank."""
    return {name: globals()[name](rank) for name in names}


def fails_midway(rank: int) -> bool:
    """Say whether gradients are torch's own after a pass that failed on all ranks while its messages were under way."""
    mesh, found = mesh_of((2, 1)), []
    models = [native(made(EVEN), mesh), ours(made(EVEN), mesh, **quick("wfbp", strategy="ring", bulk=False))]
    for model in models:
        train(model, rank, Case(steps=3))
        handle = model.blocks[0].register_forward_hook(_fail_behind)
        loss = loss_of(model, rank, 100)
        if rank == 1:
            time.sleep(0.5)  # what rank 0 has sent by then waits for this rank's
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except ArithmeticError:
            handle.remove()
        model.reset_iter_state()  # torch's part of it
        model.zero_grad()
        loss_of(model, rank, 101).backward()  # type: ignore[no-untyped-call]
        found.append(_whole_gradients(model))
    return models[1].plan is not None and same(*found)


def _fail_behind(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("in the middle of a backward pass")

    output.register_hook(fail)


# What ranks of a host exchange.


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


# Optimizers and torch.compile.


def by_momentum(
    rank: int, shape: tuple[int, int], device: str = "cpu"
) -> tuple[list[float], list[float], list[Any], int]:
    """Train by AdamW and by CompressedAdamW; return both's losses, weights, and how many second moments are frozen."""
    mesh, found = mesh_of(shape, device), []
    one = native(made(EVEN).to(device), mesh)
    other = ours(made(EVEN).to(device), mesh, codec="onebit(block=16)", **quick(workers=shape[0], strategy="ring"))
    options = {"lr": 0.01, "betas": (0.9, 0.95)}
    optimizers = [
        torch.optim.AdamW(one.parameters(), **options),  # type: ignore[arg-type]
        CompressedAdamW(other.parameters(), ddp=other, warmup_steps=10, **options),  # type: ignore[arg-type]
    ]
    for model, optimizer in zip((one, other), optimizers, strict=True):
        losses = []
        for step in range(60):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step % 5, device)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            losses.append(float(loss.detach()))
        found.append(losses)
    return found[0], found[1], weights(other), sum("is_frozen" in each for each in optimizers[1].state.values())


def compiled(rank: int, shape: tuple[int, int], device: str = "cpu", backend: str = "aot_eager") -> str:
    """Train with torch.compile by torch's own and by ours; say what differs."""
    mesh, options = mesh_of(shape, device), quick(strategy="ring" if device == "cpu" else "native")
    models = [native(made(EVEN).to(device), mesh), ours(made(EVEN).to(device), mesh, **options)]
    for model in models:
        train(torch.compile(model, backend=backend), rank, Case(), device)
    if models[1].plan is None:
        return "no plan"
    return "" if same(*map(weights, models)) else "weights differ"


def with_zero(rank: int) -> tuple[list[float], list[Any], int]:
    """Train our DDP wrapper with ZeroRedundancyOptimizer; return losses, weights, and how many moments are here."""
    torch.manual_seed(0)
    model = OurDDP(Model(EVEN), codec="blocks(bits=4)", **quick(strategy="ring"))
    model.sizes = EVEN
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    losses = []
    for step in range(30):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step % 5)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    kept = sum(value["exp_avg"].numel() for value in optimizer.optim.state.values())
    return losses, [each.detach().numpy().copy() for each in model.parameters()], kept


# Planning.


def planned_again(rank: int) -> dict[str, Any]:
    """Plan for a network where startups take a second, and find out that they do not; then train by that plan."""
    mesh, lines = mesh_of((2, 2)), {"native": LinearCost(1.0, 1e-9)}
    slow = Network(2, 1.0, 1e-9, 1e-10, lines)
    options = {"strategy": "native", "profile_iterations": 2, "measure_seconds": 0.3, "measurements": False}
    model = ours(made(), mesh, network=slow, replan_drift=0.5, **options)
    hashes = []
    for step in range(26):
        model.zero_grad()
        loss_of(model, rank, step).backward()  # type: ignore[no-untyped-call]
        hashes.append(model.plan.hash if model.plan else "")
    said = model.explain()
    again = ours(made(), mesh, codec="blocks(bits=4)", plan=coded(model.plan))
    again.record_instructions()
    train(again, rank, Case(steps=3))
    timeline = again.measured_timeline()
    return {
        "hashes": hashes,
        "said": said,
        "given": again.plan.hash == coded(model.plan).hash,
        "lanes": sorted({span.lane for span in timeline.spans}),
        "buckets": [span.name for span in timeline.lane("network")],
        "traffic": again.bytes_sent(),
        "routes": [str(each) for each in again.routes_used()],
        "held": again.held_seconds,
    }


def profiled(rank: int) -> list[str]:
    """Return for each iteration the order in which messages are sent (s) and the backward pass ends (e)."""
    model, found = (
        ours(made(EVEN), mesh_of((2, 1)), **quick(strategy="native", bulk=False) | {"profile_iterations": 4}),
        [],
    )
    averages, happened = _held(model).averages, list[str]()
    start, end = averages._start_engine, averages.on_end
    averages._start_engine = lambda *given: (happened.append("s"), start(*given))[1]  # type: ignore[method-assign]
    averages.on_end = lambda: (happened.append("e"), end())[1]
    for step in range(5):
        happened.clear()
        model.zero_grad()
        loss_of(model, rank, step).backward()  # type: ignore[no-untyped-call]
        found.append("".join(happened))
    return found


def coded(plan: Plan) -> Plan:
    """Return a plan whose buckets are compressed."""
    return replace(plan, buckets=tuple(replace(each, strategy="ring", codec="blocks(bits=4)") for each in plan.buckets))


def part_of_a_mesh(rank: int) -> list[Any]:
    """Train two models at once, each on two of four ranks, as stages of a pipeline would."""
    whole = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("stage", *NAMES))
    model = ours(made(EVEN), whole[NAMES], codec="blocks(bits=4)", **quick(strategy="ring"))
    train(model, rank, Case(steps=6))
    return weights(model)
