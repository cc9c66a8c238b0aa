"""Quantising codecs over all workers of several runs at once, each tensor with its own scale, as .cll programs do.

All go through co-located parameter servers: tensor t is summed by worker t mod P. Everybody else encodes it for its
server; the server adds its own part unchanged and encodes the sum for all. Each function takes `wanted`, [run, worker,
element], returns the sum that is applied, and leaves the residuals in the place of `wanted`.
"""

import math
from collections.abc import Callable

import torch

from penstock.bench.convergence.sparse import Exchanged
from penstock.bench.convergence.triton_segments import Segments
from penstock.bench.convergence.triton_servers import gather_at_servers, keep_at_servers

_BITWIDTH = 2  # of terngrad


def onebit(wanted: torch.Tensor, tensors: Segments) -> Exchanged:
    """Send the mean of the values of the same sign (1-bit SGD)."""
    total = gather_at_servers(wanted, *means_of_signs(wanted, tensors), None, tensors)
    return keep_at_servers(total, wanted, *means_of_signs(total, tensors), None, tensors), wanted


def terngrad(wanted: torch.Tensor, tensors: Segments) -> Exchanged:
    """Send every value rounded at random to one of 2^bitwidth levels between its tensor's smallest and largest."""
    total = gather_at_servers(wanted, *levels(wanted, tensors), torch.rand_like(wanted), tensors)
    return keep_at_servers(total, wanted, *levels(total, tensors), torch.rand_like(total), tensors), wanted


def means_of_signs(values: torch.Tensor, tensors: Segments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every tensor's mean of values not negative, and of negative ones."""
    positive, negative, count, _, _ = tensors.summary(values)
    return positive / count.clamp(min=1), negative / (tensors.numel - count).clamp(min=1)


def levels(values: torch.Tensor, tensors: Segments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every tensor's distance between levels, and the lowest level."""
    *_, low, high = tensors.summary(values)
    return (high - low) / ((1 << _BITWIDTH) - 1), low


def largest(tensors: Segments, density: float) -> Callable[[torch.Tensor], Exchanged]:
    """Return what sends the largest entries of every tensor, as dgc does.

    dgc's sampled threshold may send fewer, never more.
    """
    take = tensors.taker([math.ceil(size * density) for size in tensors.sizes])

    def exchange(wanted: torch.Tensor) -> Exchanged:
        server = (tensors.index % wanted.shape[-2]).expand(*wanted.shape[:-2], 1, -1)
        total = take(wanted).sum(-2, keepdim=True).add_(wanted.gather(-2, server))  # what a server has not sent: all
        applied = take(total).squeeze(-2)
        return applied, wanted.scatter_(-2, server, total)

    return exchange
