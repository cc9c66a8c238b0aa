"""A task small enough for tests, with what a resumed run could get wrong: dropout, buffers, own randomness."""

import random
from dataclasses import dataclass

import torch
from torch import nn

from penstock.zoo import Shard


@dataclass(frozen=True)
class Tiny:
    """Learn the sign of a sum."""

    name: str = "tiny"
    metric_name: str = "held-out loss"
    batch: int = 4
    samples: int = 48
    fails_at: int = 0  # a batch that raises, on rank 1
    slow: bool = False

    def model(self):
        return nn.Sequential(
            nn.Linear(8, 33),
            nn.BatchNorm1d(33),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(33, 7),
            nn.ReLU(),
            nn.Linear(7, 1),
        )

    def optimizer(self, parameters):
        return torch.optim.Adam(parameters, lr=0.01)

    def batches(self, shard: Shard, start: int):
        number = start
        while True:
            if self.fails_at and number == self.fails_at and shard.rank == 1:
                raise ValueError("this batch is bad")
            if self.slow:
                import time

                time.sleep(0.05)
            generator = torch.Generator().manual_seed(1000 * number + shard.rank)
            yield torch.randn(shard.batch, 8, generator=generator) + 0.01 * random.random()
            number += 1

    def loss(self, model, batch):
        return nn.functional.softplus(-model(batch)[:, 0] * batch.sum(1).sign()).mean()

    def evaluate(self, model, shard: Shard):
        torch.rand(3)  # what an evaluation draws must not change the training
        generator = torch.Generator().manual_seed(7 + shard.rank)
        return 16 * self.loss(model, torch.randn(16, 8, generator=generator)).item(), 16


@dataclass(frozen=True)
class TinySgd(Tiny):
    """The same with SGD, whose momentum can be the exchange's."""

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.5)


def failing():
    return Tiny(fails_at=3)


def slow():
    return Tiny(slow=True)


def half():
    return object()
