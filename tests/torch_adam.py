"""What each process of a test of `CompressedAdamW` does: a small net on its own data, and what came of its steps."""

import io
from typing import Any

import torch
from torch import nn

from penstock.curves import CodecCurves, Curve
from penstock.exchange.compression import AUTO_CODECS
from penstock.network import LinearCost, Network
from penstock.plan import Bucket, Plan
from penstock.runtime.request import plan_composition
from penstock.torch import DistributedDataParallel as OurDDP
from penstock.torch.optim import CompressedAdamW, _with_floor
from penstock.verify import verify
from torch_training import quick

WARMUP = 6


def net(bias: bool = True) -> nn.Module:
    torch.manual_seed(5)
    if not bias:
        return nn.Sequential(nn.Linear(24, 48, bias=False), nn.Tanh(), nn.Linear(48, 8, bias=False))
    return nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.LayerNorm(48), nn.Linear(48, 8))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(32, 24, generator=generator)
    return x, torch.sin(x[:, :8] + x[:, 8:16])


def groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    found = [{"params": matrices, "weight_decay": 0.1}]
    return found + ([{"params": vectors, "weight_decay": 0.0, "betas": (0.8, 0.99)}] if vectors else [])


def make(codec: str | None, optimizer: str = "compressed", **options: Any) -> tuple[OurDDP, torch.optim.Optimizer]:
    wrapper = {name: options.pop(name) for name in ("dense_below", "plan", "strategy") if name in options}
    model = OurDDP(net(options.pop("bias", True)), codec=codec, **quick() | wrapper)
    if optimizer == "torch":
        return model, torch.optim.AdamW(groups(model), lr=0.01)
    model.requires_grad_(not options.pop("frozen", False))  # as a GAN's discriminator while its generator learns
    ours = CompressedAdamW(groups(model), lr=0.01, ddp=model, **{"warmup_steps": WARMUP} | options)
    return model.requires_grad_(True), ours


def train(
    rank: int,
    model: OurDDP,
    optimizer: torch.optim.Optimizer,
    steps: range,
    passes: int = 1,
    clip: float = 0.0,
    times: float = 1.0,
) -> list[float]:
    """Train; the loss counts `times`."""
    losses = []
    for step in steps:
        for part in range(passes):
            x, y = (each.chunk(passes)[part] for each in batch(rank, step))
            if part < passes - 1:
                with model.no_sync():
                    (times * nn.functional.mse_loss(model(x), y) / passes).backward()
            else:
                loss = times * nn.functional.mse_loss(model(x), y) / passes
                loss.backward()
                losses.append(float(loss.detach()) * passes)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def weights(model: nn.Module) -> Any:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()]).numpy().copy()


def runs(rank: int, cases: dict[str, dict[str, Any]], steps: int) -> dict[str, dict[str, Any]]:
    """Train by each case's wrapper and optimizer."""
    found = {}
    for name, case in cases.items():
        options = dict(case)
        how = {each: options.pop(each) for each in ("passes", "clip") if each in options}
        model, optimizer = make(**options)
        losses = train(rank, model, optimizer, range(steps), **how)
        found[name] = {"weights": weights(model), "losses": losses, "traffic": model.bytes_sent()}
    return found


def one_momentum_step(rank: int, passes: int, times: float = 1.0) -> dict[str, dict[str, Any]]:
    """Take the first step with exchanged momentum; return what it began with, this rank's gradients, and its end.

    `times`: by how much rank 0's loss of that step is multiplied.
    """
    model, optimizer = make("blocks(bits=8)")
    train(rank, model, optimizer, range(WARMUP))
    alone = net()
    alone.load_state_dict(model.module.state_dict())
    x, y = batch(rank, WARMUP)
    nn.functional.mse_loss(alone(x), y).backward()
    gradients = {name: each.grad for name, each in alone.named_parameters()}
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    found = {}
    for name, parameter in model.module.named_parameters():
        state, group = optimizer.state[parameter], group_of[parameter]
        found[name] = {
            "before": parameter.detach().numpy().copy(),
            "gradient": gradients[name].numpy(),
            "momentum": state["exp_avg"].numpy().copy(),
            "second moment": _with_floor(state["mean_square"]).numpy().copy(),
            "beta1": group["betas"][0],
            "decay": group["weight_decay"],
        }
    train(rank, model, optimizer, range(WARMUP, WARMUP + 1), passes, times=times if rank == 0 else 1.0)
    for name, parameter in model.module.named_parameters():
        found[name]["after"] = parameter.detach().numpy().copy()
    return found


def one_bucket(codec: str) -> Plan:
    """Return a plan for the net without biases: one message, in the order in which gradients become ready."""
    shapes = dict(reversed(list(net(bias=False).named_parameters())))
    nbytes = sum(4 * each.numel() for each in shapes.values())
    return Plan("net", 2, "hand", (Bucket(tuple(shapes), nbytes, "parameter_server", codec),))


def mean_squares(rank: int, clips: list[float]) -> list[list[Any]]:
    """Warm up without moving, clipping gradients at each of some norms; return what of them is noted."""
    found = []
    for clip in clips:
        codec = "blocks(bits=8)"
        model, optimizer = make(codec, plan=one_bucket(codec), bias=False, warmup_codec=codec)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        train(rank, model, optimizer, range(WARMUP), clip=clip)
        found.append([optimizer.state[each]["mean_square"].numpy().copy() for each in model.parameters()])
    return found


def resumed(rank: int, codec: str, at: int, steps: int) -> tuple[Any, Any]:
    """Train through, and train again from a checkpoint; return the weights of both."""
    plan = one_bucket(codec)
    model, optimizer = make(codec, plan=plan, bias=False)
    train(rank, model, optimizer, range(at))
    kept = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    kept = torch.load(_saved(kept), weights_only=True)
    mine = model.exchange_state_dict()
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    train(rank, model, optimizer, range(at, steps))
    again, second = make(codec, plan=plan, bias=False)
    again.module.load_state_dict(kept["model"])
    second.load_state_dict(kept["optimizer"])
    again.load_exchange_state_dict(everyone)
    train(rank, again, second, range(at, steps))
    return weights(model), weights(again)


def _saved(values: Any) -> Any:
    file = io.BytesIO()
    torch.save(values, file)
    file.seek(0)
    return file


def refused(rank: int) -> list[str]:
    """Return what each wrong use says."""
    said = []
    for wrong in (
        lambda: make("onebit", warmup_steps=None),
        lambda: make("gtopk"),
        lambda: make("onebit", warmup_codec="nonsense"),
        lambda: make("onebit", amsgrad=True),
        lambda: make("onebit", max_norm=-1.0),
        _half,
        _twice,
    ):
        try:
            wrong()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def _half() -> None:
    model = OurDDP(net(), codec="onebit", **quick())
    CompressedAdamW([next(iter(model.parameters()))], ddp=model, warmup_steps=4)


def _twice() -> None:
    model, optimizer = make("onebit", warmup_steps=2)
    train(0, model, optimizer, range(3))
    for _ in range(2):
        model(batch(0, 0)[0]).sum().backward()


def chosen(rank: int, optimizers: list[str]) -> dict[str, set[str | None]]:
    """Let "auto" choose where every codec is far cheaper than dense, the coarser the more; return codecs of plans."""
    found = {}
    for name in optimizers:
        codecs = {*AUTO_CODECS, "terngrad(bitwidth=2)", "onebit", "onebit(block=256)"}
        cost = {"bf16": 5e-4, "blocks(bits=8)": 2.5e-4, "blocks(bits=4)": 1.2e-4, "terngrad(bitwidth=2)": 6e-5}
        lines = {"ring": LinearCost(1e-4, 1e-3)}
        for codec in codecs:
            line = LinearCost(1e-4, cost.get(codec, 1e-5))
            lines |= {f"ring+{codec}": line, f"ring+{codec}/8": line}
        curves = CodecCurves(1 / 32, Curve(1e-12, 1e-9), Curve(1e-12, 1e-9))
        network = Network(2, 1e-4, 1e-3, 1e-10, lines, dict.fromkeys(codecs, curves))
        model = OurDDP(net(), codec="auto", strategy="ring", network=network, profile_iterations=2)
        if name == "CompressedAdamW":
            optimizer: torch.optim.Optimizer = CompressedAdamW(model.parameters(), ddp=model, warmup_steps=4)
        else:
            optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        train(rank, model, optimizer, range(5))
        assert model.plan is not None
        numel = {name: parameter.numel() for name, parameter in model.module.named_parameters()}
        assert verify(plan_composition(model.plan, numel)).proved  # the plan in force, in lanes
        found[name] = {bucket.codec for bucket in model.plan.buckets}
    return found
