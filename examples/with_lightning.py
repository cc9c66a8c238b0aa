"""The shape of a Lightning script: a LightningModule, a Trainer with two devices, fit."""

import logging
import os
import sys
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, seed_everything
from penstock.integrations.lightning import Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(LightningModule):
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

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return what updates the weights."""
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def on_train_end(self) -> None:
        """Say what came of it."""
        if self.trainer.is_global_zero:
            print(f"final loss {self.losses[-1]:.6f}", file=sys.stderr)
            print(f"{self.trainer.world_size} workers, {len(self.losses)} steps")
            print(f"the loss fell below a tenth: {self.losses[-1] < self.losses[0] / 10}")


warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
seed_everything(1, verbose=False)
inputs = torch.randn(1024, 8)
trainer = Trainer(
    accelerator="cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", 2)),
    strategy="ddp",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Regression(), DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8))
