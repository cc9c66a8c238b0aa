"""Quantising codecs over all workers of several runs at once, each tensor with its own scale, as .cll programs do."""

import math
from collections.abc import Callable

import torch

from penstock.bench.convergence.sparse import Exchanged
from penstock.bench.convergence.triton_segments import Segments

Quantise = Callable[[torch.Tensor, Segments], torch.Tensor]  # what the other side decodes


def onebit(values: torch.Tensor, tensors: Segments) -> torch.Tensor:
    """Return the mean of the values of the same sign (1-bit SGD)."""
    positive, negative, count, _, _ = tensors.summary(values)
    numel = tensors.numel
    high, low = positive / count.clamp(min=1), negative / (numel - count).clamp(min=1)
    return torch.where(values >= 0, high[..., tensors.index], low[..., tensors.index])


def terngrad(values: torch.Tensor, tensors: Segments, bitwidth: int = 2) -> torch.Tensor:
    """Round at random to one of 2^bitwidth levels between a tensor's smallest and largest value."""
    *_, low, high = tensors.summary(values)
    gap = ((high - low) / ((1 << bitwidth) - 1))[..., tensors.index]
    low = low[..., tensors.index]
    level = ((values - low) / gap + torch.rand_like(values)).floor()
    return torch.where(gap > 0, low + level * gap, values)


def exchange(wanted: torch.Tensor, quantise: Quantise, tensors: Segments) -> Exchanged:
    """Exchange through co-located parameter servers: tensor t is summed by worker t mod P.

    Everybody else encodes it for its server; the server adds its own part unchanged and encodes the sum for all.
    """
    workers = torch.arange(wanted.shape[-2], device=wanted.device)[:, None]
    served = tensors.index % wanted.shape[-2] == workers
    sent = quantise(wanted, tensors)
    total = torch.where(served, wanted, sent).sum(-2, keepdim=True)
    applied = quantise(total, tensors)
    return applied.squeeze(-2), torch.where(served, total - applied, wanted - sent)


def largest(tensors: Segments, density: float) -> Quantise:
    """Return what keeps the largest entries of every tensor, as dgc does.

    dgc's sampled threshold may keep fewer, never more.
    """
    take = tensors.taker([math.ceil(size * density) for size in tensors.sizes])
    return lambda values, _: take(values.clone())
