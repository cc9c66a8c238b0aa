"""The ways of training that `penstock bench train` compares: each wraps a module for data-parallel training."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import PenstockError
from penstock.planners import PLANNERS
from penstock.torch import DistributedDataParallel as PlannedDataParallel
from penstock.torch.overlap import ALGORITHMS, BulkSynchronous

ALONE = "no-communication"
DEFAULT = "ddp"
STOCK = "ddp with other buckets"  # kinds of method, by what they may be compared with
PLANNED = "planned"
OTHER = "other"
LEARNING_RATE = 1e-3  # small: weights must stay finite, since denormal or infinite ones change the speed


@dataclass(frozen=True, slots=True)
class Trained:
    """A model that is being trained."""

    model: nn.Module
    update: Callable[[], None]  # after each backward pass: changes the weights and forgets the gradients
    finish: Callable[[], None] | None = None  # waits for what is still under way after an update, where anything is


@dataclass(frozen=True, slots=True)
class Method:
    """A way of training."""

    begin: Callable[[nn.Module, int], Trained]  # from a module, and the iterations to profile
    kind: str
    plans: bool = False  # its first iterations profile
    risky: bool = False  # may crash its process, so it runs in one of its own


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return what every method updates its weights with."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def _updated_at_once(model: nn.Module) -> Trained:
    optimizer = make_optimizer(model.parameters())

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trained(model, update)


def _bare(module: nn.Module, _: int) -> Trained:
    return _updated_at_once(module)


def _stock(module: nn.Module, _: int, **options: Any) -> Trained:
    return _updated_at_once(DistributedDataParallel(module, **options))


def _hooked(module: nn.Module, _: int, hook: Callable[..., Any], state: Callable[[], Any] = lambda: None) -> Trained:
    model = DistributedDataParallel(module)
    model.register_comm_hook(state(), hook)
    return _updated_at_once(model)


def _powersgd_state() -> PowerSGDState:
    """Return torch's defaults, except that it compresses from the third iteration on and not from the thousandth."""
    return PowerSGDState(process_group=None, start_powerSGD_iter=2)


def _planned(module: nn.Module, profile_iterations: int, **options: Any) -> Trained:
    return _updated_at_once(PlannedDataParallel(module, profile_iterations=profile_iterations, **options))


def _bulk_synchronous(module: nn.Module, _: int, algorithm: str) -> Trained:
    model = BulkSynchronous(module, make_optimizer, algorithm)
    return Trained(model, model.step, model.finish)


METHODS: dict[str, Method] = {
    ALONE: Method(_bare, OTHER),  # the bare module on every rank: no wrapper, so nothing is sent
    DEFAULT: Method(_stock, STOCK),
    **{f"ddp-{mib}": Method(partial(_stock, bucket_cap_mb=mib), STOCK) for mib in (1, 5, 25, 100)},
    "ddp-views": Method(partial(_stock, gradient_as_bucket_view=True), STOCK),
    "ddp-fp16": Method(partial(_hooked, hook=default_hooks.fp16_compress_hook), OTHER),
    "ddp-bf16": Method(partial(_hooked, hook=default_hooks.bf16_compress_hook), OTHER),
    "ddp-powersgd": Method(partial(_hooked, hook=powerSGD_hook, state=_powersgd_state), OTHER, risky=True),
    **{f"penstock-{name}": Method(partial(_planned, planner=name), PLANNED, plans=True) for name in PLANNERS},
    "penstock-exact-native": Method(partial(_planned, planner="exact", strategy="native"), PLANNED, plans=True),
    **{f"penstock-bsp-{name}": Method(partial(_bulk_synchronous, algorithm=name), PLANNED) for name in ALGORITHMS},
    **{
        f"penstock-{name}": Method(partial(_planned, codec=codec), OTHER, plans=True)
        for name, codec in (
            ("onebit", "onebit"),
            ("terngrad", "terngrad(bitwidth=2)"),
            ("gtopk", "gtopk(density=0.001)"),
            ("auto", "auto"),
        )
    },
    **{
        f"penstock-onebit-{name}": Method(partial(_planned, codec="onebit", planner=name), OTHER, plans=True)
        for name in ("selective", "joint")
    },
}


def find_method(name: str) -> Method:
    """Return the method called `name`."""
    if name not in METHODS:
        raise PenstockError(f"no training method called {name!r}; wanted one of {', '.join(METHODS)}")
    return METHODS[name]
