"""Tasks small enough for Triton's interpreter."""

import torch
from torch import nn
from torch.nn import functional

from penstock.bench.convergence.layers import Linear
from penstock.bench.convergence.tasks import Recipe, Task


def line_task(steps=60):
    """Return the task of telling on which side of a line points lie."""
    inputs = torch.randn((64, 4), generator=torch.Generator().manual_seed(1))
    labels = (inputs[:, 0] + 2 * inputs[:, 1] > 0.5).long()

    def forward(x, of, seen):
        return Linear.apply(x, of["weight"]) + of["bias"][:, :, None]

    recipe = Recipe(steps, learning_rate=0.5, weight_decay=1e-3, rising=2, warmup=2)
    return Task(
        "line", "loss", "lower", lambda: nn.Linear(4, 2), 64, lambda chosen, noise: (inputs[chosen], labels[chosen]),
        forward, lambda model: float(functional.cross_entropy(model(inputs), labels)), global_batch=8, recipe=recipe,
    )  # fmt: skip
