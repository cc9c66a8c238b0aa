"""What a rank trains that only aggregates (`--servers`): a parameter server of its own process.

It holds the model for its gradients' sizes and computes nothing: its loss is 0 times all parameters, so that torch's
wrapper hands over gradients of zeros, bucket by bucket and in the order of all other ranks. The strategy asks nothing
else of a server, sends it no result but that of its own partitions, and its weights mean nothing.
"""

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from penstock.zoo.task import Shard, Task


class Serving:
    """A task without data: the model's forward pass is replaced by one that computes nothing."""

    def __init__(self, task: Task, module: nn.Module) -> None:
        self.name, self.metric_name, self.batch, self.samples = task.name, task.metric_name, task.batch, task.samples
        self._task, self._module = task, module

        def forward(*_: Any, **__: Any) -> Tensor:
            return torch.stack([parameter.sum() * 0.0 for parameter in module.parameters()]).sum()

        module.forward = forward

    def model(self) -> nn.Module:
        """Return the module that serves."""
        return self._module

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return one that moves nothing: a server has no weights of its own."""
        return torch.optim.SGD(parameters, lr=0.0)

    def batches(self, shard: Shard, start: int) -> Iterator[Any]:
        """Yield nothing to compute, for ever."""
        return repeat(None)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return 0, of which all gradients are zeros."""
        loss: Tensor = model(batch)
        return loss

    def evaluate(self, model: nn.Module, shard: Shard) -> tuple[float, float]:
        """Return a part of no held-out data."""
        return 0.0, 0.0
