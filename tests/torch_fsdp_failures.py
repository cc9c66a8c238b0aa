"""What ranks do in tests of what goes wrong in sharded training: options, gradients, passes and ranks."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from penstock.torch import fully_shard_with
from penstock.torch.optim import CompressedAdamW
from torch_fsdp import (
    BF16,
    BF16_SUMS,
    EVEN,
    NAMES,
    RING,
    Case,
    Sizes,
    adamw,
    loss_of,
    made,
    mesh_of,
    native,
    ours,
    quick,
    same,
    step_in_backward,
    train,
    weights,
    whole,
    whole_gradients,
)
from torch_fsdp_state import cut_by_columns_and_rows


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


class _LastIsNan(torch.autograd.Function):
    """Passes a vector on; the last element of its gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        found = gradient.clone()
        found[-1] = torch.nan
        return found


def spoilt_when(model: Any, spoils: Callable[[], bool], where: str = "out") -> Any:
    """Return a model that has, when asked for, NaN in the last element of a bias, which one rank of a host averages."""

    def spoil(module: Any, _: Any, output: torch.Tensor) -> torch.Tensor:
        return output + _LastIsNan.apply(module.bias) - module.bias if spoils() else output  # type: ignore[no-untyped-call]

    model.get_submodule(where).register_forward_hook(spoil)
    return model


def _nan_in_one_shard(rank: int, mesh: DeviceMesh) -> None:
    step, model = 0, ours(made(), mesh, codec="blocks(bits=4)", **quick(strategy="ring"))
    spoilt_when(model, lambda: step == 4 and rank == 3)
    for step in range(6):
        loss_of(model, rank, step).backward()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Scaled:
    """A training with a gradient scaler, in which one rank has NaN in one shard in one step."""

    scales: list[float]  # what losses were multiplied by, after each step
    weights: list[list[Any]]  # after each step
    owed: list[list[Any]]  # by replicas, after each step, as gradients that nobody has scaled; empty without a codec


def scaled(rank: int, codec: str | None, spoilt: int = 5) -> Scaled:
    """Train with torch's GradScaler; rank 3 has NaN in the last element of a bias in step `spoilt`."""
    scaler, mesh, step = torch.amp.GradScaler("cpu", init_scale=1024.0), mesh_of((2, 2)), 0
    asked = {"codec": codec, "on_nonfinite": "skip", "grad_scaler": scaler, **RING} if codec else {}
    model = spoilt_when(ours(made(), mesh, **asked), lambda: step == spoilt and rank == 3)
    optimizer, found = adamw(model), Scaled([], [], [])
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, step)).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        found.scales.append(scaler.get_scale())
        found.weights.append(weights(model))
        state = model.exchange_state_dict()
        found.owed.append([whole(each).numpy() / state["scale"] for each in state.get("residual", {}).values()])
    return found


def _nan_in_one_shard_stepped(rank: int, mesh: DeviceMesh) -> None:
    step, model = 0, ours(made(), mesh, codec="blocks(bits=4)", **quick(strategy="ring"))
    step_in_backward(model)
    spoilt_when(model, lambda: step == 4 and rank == 3, "blocks.1.down")
    for step in range(6):
        loss_of(model, rank, step).backward()  # type: ignore[no-untyped-call]


def _stepped_before_averages(rank: int, mesh: DeviceMesh) -> None:
    model = ours(made(), mesh)
    step_in_backward(model)
    model.set_requires_all_reduce(False)
    loss_of(model, rank, 0).backward()  # type: ignore[no-untyped-call]


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


def _layer_in_bf16(rank: int, mesh: DeviceMesh) -> None:
    model = made()
    fully_shard(model.blocks[0], mesh=mesh["shard"], **BF16_SUMS)
    fully_shard_with(model, mesh, shard_codec="blocks(bits=8)")


def _beside_another_mesh(rank: int, mesh: DeviceMesh) -> None:
    tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rest", "tp"))["tp"]
    ours(cut_by_columns_and_rows(tp), mesh, codec="onebit")


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
    "a shard codec of a bf16 model": lambda rank, mesh: fully_shard_with(
        made().bfloat16(), mesh, shard_codec="blocks(bits=8)"
    ),
    "a shard codec of layers sharded in bf16": _layer_in_bf16,
    "entries of the model": lambda rank, mesh: fully_shard_with(
        made(), mesh, codec="gtopk", density=0.1, select="model", planner="single"
    ),
    "other shard codecs": lambda rank, mesh: fully_shard_with(
        made(), mesh, shard_codec=f"blocks(bits={4 if rank == 3 else 8})"
    ),
    "another mesh beside": _beside_another_mesh,
    "offloaded momentum": _offloaded_momentum,
    "nan": _nan,
    "nan in one shard": _nan_in_one_shard,
    "nan in one shard, stepped in backward": _nan_in_one_shard_stepped,
    "steps before averages": _stepped_before_averages,
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
        found.append(whole_gradients(model))
    return models[1].plan is not None and same(*found)


def fails_while_adding_up(rank: int) -> bool:
    """Say whether a step after a pass that failed has nothing of what replicas were to average after that."""
    mesh, found = mesh_of((2, 1)), []
    for model in (native(made(EVEN), mesh), ours(made(EVEN), mesh, **RING)):
        train(model, rank, Case(steps=3))
        model.set_requires_all_reduce(False)
        loss_of(model, rank, 100).backward()  # type: ignore[no-untyped-call]
        model.reset_iter_state()
        model.zero_grad()
        model.set_requires_all_reduce(True)
        loss_of(model, rank, 101).backward()  # type: ignore[no-untyped-call]
        found.append(whole_gradients(model))
    return same(*found)


def _fail_behind(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("in the middle of a backward pass")

    output.register_hook(fail)
