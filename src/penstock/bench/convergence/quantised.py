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

    sizes: tuple[int, ...]
    index: torch.Tensor  # of each element: its tensor
    numel: torch.Tensor  # the sizes, on the device

    @classmethod
    def of(cls, sizes: Sequence[int], device: str = "cpu") -> "Parts":
        """Return the places of tensors of these sizes, one after the other."""
        numel = torch.tensor(sizes)
        return cls(tuple(sizes), torch.repeat_interleave(numel).to(device), numel.to(device))

    def each(self, values: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Reduce each tensor in each row.

        One small kernel per tensor: adding all elements to a few places at once would make them queue.
        """
        return torch.stack([reduce(piece) for piece in torch.split(values, list(self.sizes), dim=1)], dim=1)


def _sum(values: torch.Tensor) -> torch.Tensor:
    return values.sum(1)


Quantise = Callable[[torch.Tensor, Parts], torch.Tensor]  # what the other side decodes


def onebit(values: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Return the mean of the values of the same sign (1-bit SGD)."""
    up = (values >= 0).float()
    count = parts.each(up, _sum)
    high = parts.each(values.clamp(min=0), _sum) / count.clamp(min=1)
    low = parts.each(values.clamp(max=0), _sum) / (parts.numel - count).clamp(min=1)
    return torch.where(up.bool(), high[:, parts.index], low[:, parts.index])


def terngrad(
    values: torch.Tensor, parts: Parts, generator: torch.Generator | None = None, bitwidth: int = 2
) -> torch.Tensor:
    """Round at random to one of 2^bitwidth levels between a tensor's smallest and largest value."""
    low, high = parts.each(values, lambda piece: piece.amin(1)), parts.each(values, lambda piece: piece.amax(1))
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


def largest(values: torch.Tensor, parts: Parts, density: float) -> torch.Tensor:
    """Keep the largest entries of every tensor, as dgc does; its sampled threshold may keep fewer, never more."""
    pieces = torch.split(values, list(parts.sizes), dim=1)
    return torch.cat([select(piece, math.ceil(piece.shape[1] * density)) for piece in pieces], dim=1)
