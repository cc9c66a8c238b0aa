"""What several models of the zoo share: random batches, the usual losses, attention, and how weights begin."""

from typing import Any

import torch
from torch import Tensor, nn
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


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int, *, causal: bool, dropout: float) -> Tensor:
    """Return multi-head attention of [batch, positions, width] tensors; `causal` hides what comes later."""
    batch, positions, width = query.shape
    q, k, v = (part.view(batch, positions, heads, width // heads).transpose(1, 2) for part in (query, key, value))
    mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)
    return mixed.transpose(1, 2).reshape(batch, positions, width)


def begin_convolutions(model: nn.Module) -> None:
    """Draw convolution weights as He et al. do, so that deep stacks without normalisation learn too."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def begin_transformer(model: nn.Module) -> None:
    """Draw matrices and tables from N(0, 0.02) as BERT and GPT-2 do; vectors keep torch's own beginning."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
