"""Top-k and global top-k over all workers of several runs at once: tensors of shape (runs, workers, elements).

Each function takes `wanted`, what every worker would like to apply (gradient plus residual), and returns the sum that
is applied on all workers of a run and the new residuals, in the place of `wanted`. gTop-k's tree here takes a power of
two workers.
"""

from collections.abc import Callable

import torch

Exchanged = tuple[torch.Tensor, torch.Tensor]  # (applied sum, residuals)
Take = Callable[[torch.Tensor], torch.Tensor]  # takes the k largest out of every row, and leaves the others there


def topk(wanted: torch.Tensor, take: Take) -> Exchanged:
    """Algorithm 1: everybody's k entries reach everybody."""
    return take(wanted).sum(-2), wanted


def gtopk(wanted: torch.Tensor, take: Take) -> Exchanged:
    """Algorithm 3 without its loss: whoever drops a value in a merge keeps it."""
    blocks = take(wanted)
    step = 1
    while blocks.shape[-2] > 1:
        both = blocks[..., ::2, :] + blocks[..., 1::2, :]
        blocks = take(both)
        step *= 2
        wanted[..., ::step, :] += both
    return blocks.squeeze(-2), wanted


def gtopk_published(wanted: torch.Tensor, take: Take) -> Exchanged:
    """Algorithm 4 as printed: a sent value is put back only where its index is missing from the result (erratum 4)."""
    blocks = sent = take(wanted)
    while blocks.shape[-2] > 1:
        blocks = take(blocks[..., ::2, :] + blocks[..., 1::2, :])
    return blocks.squeeze(-2), wanted.add_(torch.where(blocks == 0, sent, 0))
