"""Lightning with planned messages: a strategy of four lines. Two workers on this machine's processor.

Needs `pip install penstock[examples]`.
"""

import logging
import warnings
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from penstock.torch import DistributedDataParallel


class PenstockStrategy(DDPStrategy):
    """Lightning's DDP with our wrapper; options of either may be given: PenstockStrategy(codec="onebit")."""

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)


class Regression(lightning.LightningModule):
    """Learns the sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """Return the loss of a batch."""
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layers(inputs), targets)
        self.losses.append(float(loss.detach()))
        return loss

    def on_train_end(self) -> None:
        """Say what came of it."""
        wrapper = self.trainer.strategy.model
        assert isinstance(wrapper, DistributedDataParallel)
        if self.trainer.is_global_zero and wrapper.plan is not None:
            print(f"{self.trainer.world_size} workers, {len(self.losses)} steps")
            print(f"messages compressed by {wrapper.plan.buckets[0].route}")
            print(f"the loss fell below a tenth: {self.losses[-1] < self.losses[0] / 10}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return what updates the weights."""
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main() -> None:
    """Train for one epoch of 64 steps."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(1, verbose=False)
    inputs = torch.randn(1024, 8)
    data = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PenstockStrategy(process_group_backend="gloo", codec="onebit", strategy="ring"),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), data)


if __name__ == "__main__":
    main()
