"""Lightning's DDP strategy with each wrapper, as tasks for a pool of ranks (`ranks.py`).

Every way of training below takes the same steps, so one plain loop in one process says what the weights must be.
"""

import os
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from conformance.ranks import RANKS, as_torchrun
from conformance.wrappers import wrapper_class

STEPS, BATCH, RATE = 8, 4, 0.1  # two epochs
WAYS: dict[str, dict[str, Any]] = {  # of training: options of the strategy
    "automatic": {},
    "accumulated": {},
    "manual": {},
    "unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "bucket_view": {"gradient_as_bucket_view": True},
    "comm_hook": {"ddp_comm_hook": allreduce_hook},
    "resumed": {},
}


def run(rank: int, folder: Path, name: str, flavour: str) -> None:
    """Train, and compare the weights with those of the plain loop."""
    os.environ |= as_torchrun(rank, folder)
    try:
        if name == "resumed":
            _fit(name, flavour, folder, STEPS // 2)
        trained = _fit(name, flavour, folder, STEPS)
    finally:
        dist.destroy_process_group()  # Lightning keeps it
    for weight, wanted in zip(trained.layers.parameters(), _expected(name == "accumulated"), strict=True):
        torch.testing.assert_close(weight.detach(), wanted)


class Strategy(DDPStrategy):
    """Lightning's DDP with one of the wrappers, made as Lightning makes torch's."""

    def __init__(self, flavour: str, **options: Any) -> None:
        super().__init__(process_group_backend="gloo", **options)
        self._flavour = flavour

    def _setup_model(self, model: nn.Module) -> nn.parallel.DistributedDataParallel:
        wrapper = wrapper_class(self._flavour)
        return wrapper(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        """Register the hook, which Lightning does on GPUs only."""
        if self._ddp_comm_hook is not None:
            self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)


class Regression(lightning.LightningModule):
    """A small network, trained in one of the ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = _layers()
        if way == "unused":
            self.never_used = nn.Linear(3, 3)
        self._is_manual = way == "manual"
        self.automatic_optimization = not self._is_manual

    def training_step(self, batch: Any, _: int) -> Tensor:
        """Return the loss of a batch; step by hand where that is the way."""
        loss = _loss(self.layers, *batch)
        self.log("loss", loss, sync_dist=True)
        if self._is_manual:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        """Evaluate between two steps."""
        self.log("validation", _loss(self.layers, *batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return what updates the weights."""
        return torch.optim.SGD(self.parameters(), lr=RATE)


def _fit(way: str, flavour: str, folder: Path, steps: int) -> Regression:
    module, kept = Regression(way), folder / "last.ckpt"
    trainer = lightning.Trainer(
        accelerator="cpu", devices=RANKS, strategy=Strategy(flavour, **WAYS[way]), max_steps=steps, max_epochs=-1,
        accumulate_grad_batches=2 if way == "accumulated" else 1, val_check_interval=2, use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    samples = TensorDataset(*_data())
    rank = int(os.environ["RANK"])
    data = DataLoader(samples, BATCH, sampler=DistributedSampler(samples, RANKS, rank, shuffle=False))
    trainer.fit(module, data, data, ckpt_path=str(kept) if kept.exists() else None)
    if steps < STEPS:
        trainer.save_checkpoint(kept)
    return module


def _expected(accumulates: bool) -> list[Tensor]:
    """Train on what all ranks see of a step together, in a plain loop."""
    torch.manual_seed(1)
    layers, (inputs, targets) = _layers(), _data()
    size = BATCH * RANKS * (2 if accumulates else 1)
    for step in range(STEPS):
        at = torch.arange(step * size, (step + 1) * size) % len(inputs)
        layers.zero_grad()
        _loss(layers, inputs[at], targets[at]).backward()
        with torch.no_grad():
            for weight in layers.parameters():
                assert weight.grad is not None
                weight -= RATE * weight.grad
    return [weight.detach() for weight in layers.parameters()]


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def _data() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(BATCH * RANKS * 4, 8, generator=torch.Generator().manual_seed(2))
    return inputs, inputs.sum(dim=1, keepdim=True)


def _loss(layers: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(layers(inputs), targets)
