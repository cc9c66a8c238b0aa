"""A `Task`: what `penstock train` trains and `penstock profile` measures, as a small protocol.

A user's own is any object with these members. `RandomTask` has them all for a model on random batches: the zoo's models
are such tasks.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

MakeBatch = Callable[[int, torch.device], tuple[Tensor, Tensor]]
Loss = Callable[[Any, Tensor], Tensor]
MEMBERS = ("name", "metric_name", "batch", "samples", "model", "optimizer", "batches", "loss", "evaluate")  # of a Task


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of the data a worker takes."""

    rank: int
    world_size: int
    batch: int  # samples per worker and iteration
    seed: int


class Task(Protocol):
    """A model, its data, how it is updated and how it is judged."""

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


@dataclass(frozen=True, slots=True)
class RandomTask:
    """A model trained on random inputs and targets: enough for real training steps, nothing to learn."""

    name: str  # as a person writes it
    batch: int  # samples per worker and iteration, unless the user says otherwise
    sample: str  # what one sample is, in words
    build: Callable[[], nn.Module]  # a freshly initialised module, on torch's default device
    make_batch: MakeBatch  # (batch, device) -> random inputs and targets
    compare: Loss  # (what the model returned, targets) -> a scalar
    metric_name: str = "loss of random samples"

    @property
    def samples(self) -> int:
        """As many as a hundred batches have."""
        return 100 * self.batch

    def model(self) -> nn.Module:
        """Return a fresh module."""
        return self.build()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    def batches(self, shard: Shard, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches drawn from the seed, their number and the rank; torch's own generator stays as it is."""
        number = start
        while True:
            yield self._drawn(shard, number)
            number += 1

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return how far the model's outputs are from the targets."""
        inputs, targets = batch
        return self.compare(model(inputs), targets)

    def evaluate(self, model: nn.Module, shard: Shard) -> tuple[float, float]:
        """Return the loss of one batch that is never trained on, times its samples, and their number."""
        batch = to_device(self._drawn(shard, -1), next(model.parameters()).device)
        return shard.batch * self.loss(model, batch).item(), shard.batch

    def _drawn(self, shard: Shard, number: int) -> tuple[Tensor, Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(hash((shard.seed, shard.rank, number)))  # of integers: the same in every process
            return self.make_batch(shard.batch, torch.device("cpu"))


def first_batch(task: Task, batch: int, device: torch.device) -> Any:
    """Return the first batch of a single worker, of so many samples (0: the task's own), on `device`."""
    return to_device(next(task.batches(Shard(0, 1, batch or task.batch, seed=1), 0)), device)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on `device`, through tuples, lists and dictionaries."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, tuple | list):
        return type(batch)(to_device(part, device) for part in batch)
    if isinstance(batch, dict):
        return {key: to_device(part, device) for key, part in batch.items()}
    return batch
