"""Top-k and global top-k over all workers at once: tensors of shape (workers, elements).

Each function takes `wanted`, what every worker would like to apply (gradient plus residual), and returns the sum that
is applied on all of them and the new residuals. gTop-k's tree here takes a power of two workers.
"""

import torch

Exchanged = tuple[torch.Tensor, torch.Tensor]  # (applied sum, residuals)


def select(values: torch.Tensor, k: int) -> torch.Tensor:
    """Keep the k entries of largest magnitude in each row and zero the rest."""
    where = values.abs().topk(k, dim=-1, sorted=False).indices
    return torch.zeros_like(values).scatter_(-1, where, values.gather(-1, where))


def topk(wanted: torch.Tensor, k: int) -> Exchanged:
    """Algorithm 1: everybody's k entries reach everybody."""
    sent = select(wanted, k)
    return sent.sum(0), wanted - sent


def gtopk(wanted: torch.Tensor, k: int) -> Exchanged:
    """Algorithm 3 without its loss: whoever drops a value in a merge keeps it."""
    blocks = select(wanted, k)
    residuals = wanted - blocks
    step = 1
    while step < len(wanted):
        both = blocks[:: 2 * step] + blocks[step :: 2 * step]
        kept = select(both, k)
        residuals[:: 2 * step] += both - kept
        blocks[:: 2 * step] = kept
        step *= 2
    return blocks[0].clone(), residuals


def gtopk_published(wanted: torch.Tensor, k: int) -> Exchanged:
    """Algorithm 4 as printed: a sent value is put back only where its index is missing from the result (erratum 4)."""
    applied, _ = gtopk(wanted, k)
    sent = select(wanted, k)
    return applied, wanted - sent * (applied != 0)
