"""The pointwise part of an LSTM's step, forward and backward: one launch each.

Gates are [sequence, 4 x width] in torch's order: input, forget, cell, output.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _cell(given, hidden, before, gates, c, h, step, elements, width, BLOCK: tl.constexpr):
    """Write the activated gates, the cell and the output; `step` is the distance between sequences in `given`."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    row, column = at // width, at % width
    x, place = given + row * step + column, row * 4 * width + column
    i = tl.sigmoid(tl.load(x, inside, 0.0).to(tl.float32) + tl.load(hidden + place, inside, 0.0))
    f = tl.sigmoid(tl.load(x + width, inside, 0.0).to(tl.float32) + tl.load(hidden + place + width, inside, 0.0))
    g = _tanh(tl.load(x + 2 * width, inside, 0.0).to(tl.float32) + tl.load(hidden + place + 2 * width, inside, 0.0))
    o = tl.sigmoid(
        tl.load(x + 3 * width, inside, 0.0).to(tl.float32) + tl.load(hidden + place + 3 * width, inside, 0.0)
    )
    now = f * tl.load(before + at, inside, 0.0) + i * g
    tl.store(gates + place, i, inside)
    tl.store(gates + place + width, f, inside)
    tl.store(gates + place + 2 * width, g, inside)
    tl.store(gates + place + 3 * width, o, inside)
    tl.store(c + at, now, inside)
    tl.store(h + at, (o * _tanh(now)).to(h.dtype.element_ty), inside)


@triton.jit
def _cell_back(dh, carried, dc, before, now, gates, dgates, step, elements, width, BLOCK: tl.constexpr):
    """Write the gates' gradients, and change `dc` into the gradient of the cell before."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    row, column = at // width, at % width
    place = row * 4 * width + column
    i, f = tl.load(gates + place, inside, 0.0), tl.load(gates + place + width, inside, 0.0)
    g, o = tl.load(gates + place + 2 * width, inside, 0.0), tl.load(gates + place + 3 * width, inside, 0.0)
    slope = tl.load(dh + row * step + column, inside, 0.0).to(tl.float32) + tl.load(carried + at, inside, 0.0)
    bent = _tanh(tl.load(now + at, inside, 0.0))
    cell = tl.load(dc + at, inside, 0.0) + slope * o * (1 - bent * bent)
    kind = dgates.dtype.element_ty
    tl.store(dgates + place, (cell * g * i * (1 - i)).to(kind), inside)
    tl.store(dgates + place + width, (cell * tl.load(before + at, inside, 0.0) * f * (1 - f)).to(kind), inside)
    tl.store(dgates + place + 2 * width, (cell * i * (1 - g * g)).to(kind), inside)
    tl.store(dgates + place + 3 * width, (slope * bent * o * (1 - o)).to(kind), inside)
    tl.store(dc + at, cell * f, inside)


def cell(given: torch.Tensor, hidden: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the activated gates, the cell and the output (in the type of `given`) of every sequence."""
    gates, c = torch.empty_like(hidden), torch.empty_like(before)
    h = torch.empty(before.shape, device=before.device, dtype=given.dtype)
    grid = (triton.cdiv(before.numel(), _BLOCK),)
    _cell[grid](given, hidden, before, gates, c, h, given.stride(0), before.numel(), before.shape[1], BLOCK=_BLOCK)
    return gates, c, h


def cell_back(
    dh: torch.Tensor, carried: torch.Tensor, dc: torch.Tensor, before: torch.Tensor, now: torch.Tensor,
    gates: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return the gates' gradients in the type of `dh`; `dc` becomes the gradient of the cell before."""
    dgates = torch.empty(gates.shape, device=gates.device, dtype=dh.dtype)
    grid = (triton.cdiv(dc.numel(), _BLOCK),)
    _cell_back[grid](dh, carried, dc, before, now, gates, dgates, dh.stride(0), dc.numel(), dc.shape[1], BLOCK=_BLOCK)
    return dgates
