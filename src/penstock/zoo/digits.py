"""`digits`: a small convolutional network on scikit-learn's 1,797 handwritten digits (extra `digits`).

One in five is held out. The metric is the share of those that the network reads right.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import TaskError
from penstock.zoo.task import Shard

HELD_OUT_EVERY = 5
Images = tuple[Tensor, Tensor]  # images and their labels


def network() -> nn.Module:
    """Return two convolutions and two linear layers; 0.3 million parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 16, 256),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(256, 10),
    )


@dataclass(frozen=True, slots=True)
class Digits:
    """Handwritten digits."""

    batch: int = 16
    learning_rate: float = 0.05
    name: str = "digits"
    metric_name: str = "held-out accuracy"

    @property
    def samples(self) -> int:
        """Digits to train on."""
        return len(_digits(held_out=False)[1])

    def model(self) -> nn.Module:
        """Return a fresh network."""
        return network()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=0.9)

    def batches(self, shard: Shard, start: int) -> Iterator[Images]:
        """Yield shuffled batches; ranks take turns in one order that is drawn anew for each epoch."""
        images, labels = _digits(held_out=False)
        together = min(shard.batch * shard.world_size, len(labels))
        per_epoch = len(labels) // together
        number = start
        while True:
            epoch, place = divmod(number, per_epoch)
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(shard.seed + epoch))
            mine = order[place * together + shard.rank : (place + 1) * together : shard.world_size]
            yield images[mine], labels[mine]
            number += 1

    def loss(self, model: nn.Module, batch: Images) -> Tensor:
        """Return the cross entropy of the labels."""
        return functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module, shard: Shard) -> tuple[float, float]:
        """Return how many of this worker's held-out digits are read right, and how many there are."""
        images, labels = (part[shard.rank :: shard.world_size] for part in _digits(held_out=True))
        if not len(labels):
            return 0.0, 0.0
        device = next(model.parameters()).device
        right = model(images.to(device)).argmax(1) == labels.to(device)
        return float(right.sum()), len(labels)


@lru_cache(maxsize=2)
def _digits(held_out: bool) -> Images:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise TaskError(
            "task 'digits' needs scikit-learn, which is not here; `pip install 'penstock[digits]'`"
        ) from None
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16.0
    labels = torch.tensor(found.target, dtype=torch.long)
    chosen = (torch.arange(len(labels)) % HELD_OUT_EVERY == 0) == held_out
    return images[chosen], labels[chosen]
