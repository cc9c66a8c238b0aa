"""Quantising codecs over all workers at once, each tensor with its own scale: what the .cll programs compute.

`parts` gives, for every element, the number of the tensor it belongs to.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from penstock.bench.convergence.sparse import Exchanged, select


@dataclass(frozen=True, slots=True)
class Parts:
    """Where tensors lie in a flat gradient."""

    index: torch.Tensor  # of each element: its tensor
    numel: torch.Tensor  # of each tensor

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of each tensor in each row."""
        zeros = values.new_zeros((len(values), len(self.numel)))
        return zeros.index_add_(1, self.index, values)

    def extreme(self, values: torch.Tensor, how: str) -> torch.Tensor:
        """Return the smallest ("amin") or largest ("amax") value of each tensor in each row."""
        zeros = values.new_zeros((len(values), len(self.numel)))
        return zeros.scatter_reduce_(1, self.index.expand_as(values), values, how, include_self=False)


Quantise = Callable[[torch.Tensor, Parts], torch.Tensor]  # what the other side decodes


def onebit(values: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Return the mean of the values of the same sign (1-bit SGD)."""
    up = (values >= 0).float()
    count = parts.total(up)
    high = parts.total(values.clamp(min=0)) / count.clamp(min=1)
    low = parts.total(values.clamp(max=0)) / (parts.numel - count).clamp(min=1)
    return torch.where(up.bool(), high[:, parts.index], low[:, parts.index])


def terngrad(
    values: torch.Tensor, parts: Parts, generator: torch.Generator | None = None, bitwidth: int = 2
) -> torch.Tensor:
    """Round at random to one of 2^bitwidth levels between a tensor's smallest and largest value."""
    low, high = parts.extreme(values, "amin"), parts.extreme(values, "amax")
    gap = ((high - low) / ((1 << bitwidth) - 1))[:, parts.index]
    low = low[:, parts.index]
    level = ((values - low) / gap + torch.rand(values.shape, device=values.device, generator=generator)).floor()
    return torch.where(gap > 0, low + level * gap, values)


def exchange(wanted: torch.Tensor, quantise: Quantise, parts: Parts) -> Exchanged:
    """Exchange through co-located parameter servers: tensor t is summed by worker t mod P.

    Everybody else encodes it for its server; the server adds its own part unchanged and encodes the sum for all.
    """
    workers = torch.arange(len(wanted), device=wanted.device)[:, None]
    served = parts.index % len(wanted) == workers
    sent = quantise(wanted, parts)
    total = torch.where(served, wanted, sent).sum(0, keepdim=True)
    applied = quantise(total, parts)
    return applied[0], torch.where(served, total - applied, wanted - sent)


def largest(values: torch.Tensor, parts: Parts, density: float, sizes: Sequence[int]) -> torch.Tensor:
    """Keep the largest entries of every tensor, as dgc does; its sampled threshold may keep fewer, never more."""
    pieces = torch.split(values, list(sizes), dim=1)
    return torch.cat([select(piece, math.ceil(piece.shape[1] * density)) for piece in pieces], dim=1)
