"""What parameter servers do with quantised values, in one pass over all workers' gradients each way.

Two numbers a tensor say how its values are rounded: the means of either sign (onebit), or, where there is `noise`, the
distance between levels and the lowest level (terngrad).
"""

import torch
import triton
import triton.language as tl

from penstock.bench.convergence.triton_segments import BLOCK, Segments


@triton.jit
def _rounded(value, noise, first, second, at, inside, RANDOM: tl.constexpr):
    """Return what the other side decodes."""
    if RANDOM:
        chance = tl.load(noise + at, mask=inside, other=0.0)
        level = tl.floor((value - second) / tl.where(first > 0, first, 1.0) + chance)
        found = tl.where(first > 0, second + level * first, value)
    else:
        found = tl.where(value >= 0, first, second)
    return found


@triton.jit
def _gather_at_servers(wanted, noise, total, first, second, owner, begin, end, elements, segments, workers,
                       RANDOM: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Sum a block over workers, rounded but for the server's own; workers keep what rounding left."""
    run, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    own = tl.load(owner + block)
    index = tl.load(begin + block) + tl.arange(0, BLOCK)
    inside = index < tl.load(end + block)
    result = tl.zeros((BLOCK,), tl.float32)
    for worker in range(workers):
        row = run * workers + worker
        at = row * elements + index
        value = tl.load(wanted + at, mask=inside, other=0.0)
        sent = value
        if worker != own % workers:
            scale, other = tl.load(first + row * segments + own), tl.load(second + row * segments + own)
            sent = _rounded(value, noise, scale, other, at, inside, RANDOM)
            tl.store(wanted + at, value - sent, mask=inside)
        result += sent
    tl.store(total + run * elements + index, result, mask=inside)


@triton.jit
def _keep_at_servers(total, noise, wanted, first, second, owner, begin, end, elements, segments, workers,
                     RANDOM: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Round a block of sums; its server keeps what rounding left."""
    run, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    own = tl.load(owner + block)
    index = tl.load(begin + block) + tl.arange(0, BLOCK)
    inside = index < tl.load(end + block)
    at = run * elements + index
    value = tl.load(total + at, mask=inside, other=0.0)
    scale, other = tl.load(first + run * segments + own), tl.load(second + run * segments + own)
    sent = _rounded(value, noise, scale, other, at, inside, RANDOM)
    tl.store(total + at, sent, mask=inside)
    tl.store(wanted + (run * workers + own % workers) * elements + index, value - sent, mask=inside)


def gather_at_servers(
    wanted: torch.Tensor, first: torch.Tensor, second: torch.Tensor, noise: torch.Tensor | None, tensors: Segments
) -> torch.Tensor:
    """Return the sums [run, 1, element] of what servers receive; `wanted` keeps the rest, but for servers' own part."""
    runs, workers, elements = wanted.shape
    total = wanted.new_empty((runs, 1, elements))
    table = (tensors.owner, tensors.begin, tensors.end)
    _gather_at_servers[(len(tensors.owner), runs)](
        wanted, wanted if noise is None else noise, total, first, second, *table, elements, len(tensors.sizes), workers,
        RANDOM=noise is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return total


def keep_at_servers(
    total: torch.Tensor, wanted: torch.Tensor, first: torch.Tensor, second: torch.Tensor, noise: torch.Tensor | None,
    tensors: Segments,
) -> torch.Tensor:  # fmt: skip
    """Return the rounded sums [run, element], in the place of `total`; the rest goes to their servers' `wanted`."""
    runs, workers, elements = wanted.shape
    table = (tensors.owner, tensors.begin, tensors.end)
    _keep_at_servers[(len(tensors.owner), runs)](
        total, total if noise is None else noise, wanted, first, second, *table, elements, len(tensors.sizes), workers,
        RANDOM=noise is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return total.squeeze(1)
