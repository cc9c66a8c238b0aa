"""What `penstock train` trains: a model, batches, a loss and a held-out metric, as a small protocol.

A user's own is any object with these members; `penstock train --task FILE.py:function` calls the function for one.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of the data a worker takes."""

    rank: int
    world_size: int
    batch: int  # samples per worker and iteration
    seed: int


class Task(Protocol):
    """Something worth training."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def metric_name(self) -> str:
        """What `evaluate` measures, with its unit: "held-out bits per character"."""
        ...

    @property
    def batch(self) -> int:
        """Samples per worker and iteration, unless the user says otherwise."""
        ...

    @property
    def samples(self) -> int:
        """Samples in the training data: what one epoch sees."""
        ...

    def model(self) -> nn.Module:
        """Return a freshly initialised model; torch's seed is set."""
        ...

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return what updates the weights."""
        ...

    def batches(self, shard: Shard, start: int) -> Iterator[Any]:
        """Yield this worker's batches for ever, from number `start` on; the same ones each time it is asked."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of one batch, a mean over its samples."""
        ...

    def evaluate(self, model: nn.Module, shard: Shard) -> tuple[float, float]:
        """Return the sum of the metric over this worker's part of the held-out data, and how much that is."""
        ...


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on `device`, through tuples, lists and dictionaries."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, tuple | list):
        return type(batch)(to_device(part, device) for part in batch)
    if isinstance(batch, dict):
        return {key: to_device(part, device) for key, part in batch.items()}
    return batch
