"""What each process of a test of the next-forward wrapper does: train beside DistributedDataParallel, and report."""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.plan import Bucket, Plan
from penstock.torch import BulkSynchronous, layered
from penstock.torch import DistributedDataParallel as OurDDP
from torch_training import quick

STEPS = 6
BUCKETS = (
    (("6.weight", "4.weight"), "ring", None),
    (("2.weight",), "ring", "onebit"),
    (("0.weight",), "parameter_server", "terngrad(bitwidth=2)"),
)
sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def model() -> nn.Module:
    torch.manual_seed(1)
    sizes, layers = (8, 48, 64, 20, 4), list[nn.Module]()
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs, bias=False), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def plan() -> Plan:
    nbytes = {name: each.nbytes for name, each in model().named_parameters()}
    buckets = [Bucket(names, sum(nbytes[name] for name in names), *route) for names, *route in BUCKETS]
    return Plan("model", dist.get_world_size(), "given", tuple(buckets))


def loss(wrapper: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return a loss; the first one is always zero, since torch's first buckets are not the plan's."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    inputs = torch.randn(6, 8, generator=generator)
    return (wrapper(inputs) - inputs[:, :4]).square().mean() * bool(step)


def states(module: nn.Module, wrapper: Any) -> dict[str, Any]:
    owed = wrapper.exchange_state_dict()["memories"]["residual"]
    weights = {name: each.detach().clone().numpy() for name, each in module.state_dict().items()}
    return {"weights": weights, "owed": {name: each.numpy() for name, each in owed.items()}}


def by_split(rank: int, steps: range = range(STEPS), wrapper: Any = None, **options: Any) -> tuple[Any, nn.Module]:
    wrapper = wrapper or BulkSynchronous(model(), sgd, **options)
    for step in steps:
        loss(wrapper, rank, step).backward()
        wrapper.step()
    wrapper.finish()
    return wrapper, wrapper.module


def by_ddp(rank: int, **options: Any) -> tuple[Any, nn.Module]:
    wrapper = OurDDP(module := model(), **options)
    optimizer = sgd(wrapper.parameters())
    for step in range(STEPS):
        loss(wrapper, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return wrapper, module


def train_beside_ddp(rank: int) -> dict[str, Any]:
    """Train by one plan with both wrappers; say what each ends with and has sent."""
    found = {}
    for name, train in (("split", by_split), ("ddp", by_ddp)):
        wrapper, module = train(rank, plan=plan())
        sent, used = wrapper.bytes_sent(), sorted(str(each) for each in wrapper.routes_used())
        found[name] = states(module, wrapper) | {"sent": sent, "used": used}
    return found


def train_by_options(rank: int) -> dict[str, Any]:
    """Train with a codec and no plan, resume, plan, leave a layer out, use another type; say what came of each."""
    found: dict[str, Any] = {}
    whole, _ = by_split(rank, range(3), codec="onebit")
    whole.exchange_state_dict()  # settles what codecs put off, here as there
    whole, module = by_split(rank, range(3, STEPS), whole)
    found["whole"] = states(module, whole) | {"explain": whole.explain(), "sent": whole.bytes_sent()}
    first, module = by_split(rank, range(3), codec="onebit")
    saved = {"weights": module.state_dict(), "momenta": [each.state_dict() for each in first.optimizers]}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, first.exchange_state_dict())
    second = BulkSynchronous(model(), sgd, codec="onebit")
    second.module.load_state_dict(saved["weights"])
    for optimizer, state in zip(second.optimizers, saved["momenta"], strict=True):
        optimizer.load_state_dict(state)
    second.load_exchange_state_dict(everyone)
    found["resumed"] = states(by_split(rank, range(3, STEPS), second)[1], second)
    planned, _ = by_split(rank, planner="wfbp", strategy="native", **quick())
    lanes = {span.lane for span in planned.measured_timeline().spans}
    found["planned"] = {"plan": planned.plan, "routes": planned.routes_used(), "lanes": lanes}
    automatic, _ = by_split(rank, planner="wfbp", **quick())
    found["automatic"] = {bucket.strategy for bucket in automatic.plan.buckets}
    for each in (whole, first, second, planned, automatic):
        each.close()
    return found


def watch_a_forward_pass(rank: int) -> list[list[bool]]:
    """Return which layers have their new weights before the forward pass and after each of its layers."""
    layered.Split.least_nbytes = 0
    wrapper = BulkSynchronous(module := model(), sgd)
    linear, seen = [each for each in module if isinstance(each, nn.Linear)], list[list[bool]]()
    loss(wrapper, rank, 1).backward()
    wrapper.step()
    before = [each.weight.detach().clone() for each in linear]

    def note(*_: object) -> None:
        seen.append([not torch.equal(each.weight, old) for each, old in zip(linear, before, strict=True)])

    note()
    for each in linear:
        each.register_forward_hook(note)
    loss(wrapper, rank, 2)
    wrapper.close()
    return seen
