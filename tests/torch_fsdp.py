"""What ranks do in tests of sharded training; `native` is torch's own HSDP."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from penstock.errors import PenstockError
from penstock.network import LinearCost, Network
from penstock.plan import Plan
from penstock.torch import DistributedDataParallel as OurDDP
from penstock.torch import fully_shard_with
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
    freezes: str = ""  # a module's name
    unfreezes: bool = False  # that module, halfway
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
    "a frozen layer": Case(ours=RING, freezes="blocks.0"),
    "a layer that is unfrozen": Case(ours=RING, freezes="blocks.0", unfreezes=True),
    "a layer that is unfrozen, as torch sends, accumulated": Case(
        freezes="blocks.0", unfreezes=True, accumulate=2, by=LATER
    ),
    "half of a layer that is unfrozen": Case(
        Sizes(8, 8, scaled=False), ours=RING, freezes="blocks.1.up", unfreezes=True
    ),
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
    "a frozen layer": Case(freezes="blocks.0"),
    "a layer that is called twice": Case(Sizes(calls=2)),
    "layers without gradients": Case(Sizes(skips=True)),
}


@cache
def mesh_of(shape: tuple[int, int], device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, shape, mesh_dim_names=NAMES)


def made(sizes: Sizes = Sizes(), freezes: str = "") -> Model:  # noqa: B008  # a frozen value
    torch.manual_seed(0)
    model = Model(sizes)
    if freezes:
        model.get_submodule(freezes).requires_grad_(False)
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
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(
    model: Any, rank: int, case: Case, device: str = "cpu", by: torch.optim.Optimizer | None = None
) -> list[float]:
    """Train by AdamW, or by an optimizer that has stepped before; return the loss of each step."""
    optimizer = by or adamw(model)
    if case.in_backward:
        step_in_backward(model)
    losses = []
    for step in range(case.steps):
        if case.unfreezes and 2 * step == case.steps:
            model.get_submodule(case.freezes).requires_grad_(True)
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
    return kept_of(rank, case, one, other, compiles)


def kept_of(rank: int, case: Case, one: Any, other: Any, compiles: bool) -> Kept:
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
    after = float(np.sqrt(sum(float((each**2).sum()) for each in whole_gradients(model))))
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
    return whole_gradients(model)


def whole_gradients(model: Any) -> list[Any]:
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


def each_of(rank: int, functions: list[Callable[[int], Any]]) -> dict[str, Any]:
    """Return what some functions do on a rank, by their names."""
    return {each.__name__: each(rank) for each in functions}


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


def with_zero(rank: int) -> dict[str | None, dict[bool, tuple[list[float], list[Any], int]]]:
    """Train our DDP wrapper with AdamW, and with ZeroRedundancyOptimizer, with a codec and without."""
    codecs = (None, "blocks(bits=4)")
    return {codec: {in_shards: _by_adamw(rank, codec, in_shards) for in_shards in (False, True)} for codec in codecs}


def _by_adamw(rank: int, codec: str | None, in_shards: bool) -> tuple[list[float], list[Any], int]:
    """Return losses, weights, and how many moments are here."""
    torch.manual_seed(0)
    model = OurDDP(Model(EVEN), codec=codec, **quick("single", strategy="ring"))
    model.sizes = EVEN
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if in_shards:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    losses = []
    for step in range(30):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step % 5)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    state = optimizer.optim.state if in_shards else optimizer.state
    kept = sum(value["exp_avg"].numel() for value in state.values())
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
