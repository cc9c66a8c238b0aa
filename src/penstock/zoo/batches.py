"""Random batches and the usual losses, shared by the tasks of the zoo."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.zoo.task import MakeBatch


def random_images(size: int, classes: int) -> MakeBatch:
    """Return a maker of `size` x `size` colour images with one of `classes` labels each."""

    def make(batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.randn(batch, 3, size, size, device=device), torch.randint(classes, (batch,), device=device)

    return make


def random_text(words: int, steps: int) -> MakeBatch:
    """Return a maker of sequences of `steps` words out of `words`; the target of each word is the one after it."""

    def make(batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        text = torch.randint(words, (batch, steps + 1), device=device)
        return text[:, :-1], text[:, 1:]

    return make


def class_loss(logits: Any, targets: Tensor) -> Tensor:
    """Return the cross entropy of one label per sample."""
    return functional.cross_entropy(logits, targets)


def next_word_loss(logits: Any, targets: Tensor) -> Tensor:
    """Return the cross entropy of one word per position."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
