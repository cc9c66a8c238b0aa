"""What ranks do in tests of sharded training's state: saved on one mesh, loaded on another, with tensor parallelism."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from penstock.plan import save_plan
from penstock.torch.optim import CompressedAdamW
from torch_fsdp import (
    EVEN,
    NAMES,
    RING,
    Case,
    Model,
    adamw,
    kept_of,
    made,
    mesh_of,
    native,
    ours,
    quick,
    same,
    train,
    weights,
    whole,
)

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


def taken_over_from_wrapped_layers(rank: int) -> dict[str, bool]:
    """Say of what is owed behind activation checkpointing and torch.compile whether a model without them takes it."""
    mesh, bare, model = mesh_of((2, 1)), made(EVEN), made(EVEN)
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])  # type: ignore[no-untyped-call]
    model.blocks[1] = torch.compile(model.blocks[1], backend="aot_eager")  # type: ignore[assignment]
    for each in (bare, model):
        ours(each, mesh, codec="blocks(bits=4)", **quick(strategy="ring"))
    train(model, rank, Case(steps=5))
    state = model.exchange_state_dict()
    bare.load_exchange_state_dict(state)
    found = bare.exchange_state_dict()["residual"]
    alike = all(torch.equal(whole(each), whole(found[name])) for name, each in state["residual"].items())
    return {
        "named as weights are": state["residual"].keys() == dict(made(EVEN).named_parameters()).keys(),
        "the same": alike,
    }


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


# Tensor parallelism beside it.


BESIDE = ("replicate", "shard", "tp")
CUT = replace(EVEN, layers=2)


def cut_by_columns_and_rows(tp: DeviceMesh) -> Model:
    """Return a model whose layers and ends are cut by tensor parallelism; biases of rows are copies."""
    model = made(CUT)
    for each in model.blocks:
        parallelize_module(each, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    ends = {"table": RowwiseParallel(input_layouts=Replicate()), "out": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(model, tp, ends)  # type: ignore[return-value]


def beside_tensor_parallelism(rank: int, folder: str) -> dict[str, str]:
    """Say what is wrong on 2 replicas x 1 shard x 2 ranks of tensor parallelism, by what was tried; nothing: ""."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=BESIDE)
    tp, replica, coded_ = mesh["tp"], mesh["replicate"].get_local_rank(), {"codec": "blocks(bits=4)"}

    def sharded(**options: Any) -> Any:
        return ours(cut_by_columns_and_rows(tp), mesh[NAMES], **options)

    case = Case(CUT, clip=0.1)
    models = [native(cut_by_columns_and_rows(tp), mesh[NAMES]), sharded(), sharded(**RING)]
    for each in models:
        train(each, replica, case)
    found = {"bits": "" if same(*map(weights, models[:2])) else "weights differ"}
    found["bits by our ring"] = "" if same(weights(models[0]), weights(models[2])) else "weights differ"
    torchs, model = native(cut_by_columns_and_rows(tp), mesh[NAMES]), sharded(**coded_, **RING)
    kept_ = kept_of(replica, Case(CUT), torchs, model, False)
    found["nothing lost"] = kept_.wrong()
    measured = {"profile_iterations": 2, "measure_seconds": 0.3, "measurements": False}
    model = sharded(**coded_, **measured)
    optimizer = adamw(model)
    train(model, replica, Case(steps=6), by=optimizer)
    found["one plan, equal weights"] = "" if _are_alike((model.plan.hash, weights(model))) else "ranks differ"
    dcp.save(saved(model, optimizer, model.exchange_state_dict()), checkpoint_id=folder)
    other = sharded(**coded_, plan=model.plan)
    later = adamw(other)
    state = saved(other, later, other.exchange_state_to_load(folder))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(other, later, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    other.load_exchange_state_dict(state["exchange"])
    one, two = whole_state(model, optimizer), whole_state(other, later)
    lost = [str(key) for key in one if not np.array_equal(one[key], two[key])]
    owes = any(np.abs(value).max() > 0 for key, value in one.items() if key[0] == "residual")
    found["state"] = ", ".join(lost) if owes else "nothing is owed"
    for each, by in ((model, optimizer), (other, later)):
        train(each, replica, Case(steps=4), by=by)
    found["resumed"] = "" if same(weights(model), weights(other)) else "weights differ"
    return found


def _are_alike(value: Any) -> bool:
    """Say whether all ranks have the same hash and arrays."""
    digest = [value[0], *(hashlib.sha256(each.tobytes()).hexdigest() for each in value[1])]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, digest)
    return all(each == digest for each in everyone)
