"""Batch normalisation with a worker's own statistics, then an addition and a ReLU: two passes each way.

Values are [worker of a run, place, channel]: a worker's images and pixels are its places. Channels are a power of two.
"""

import torch
import triton
import triton.language as tl

_PLACES = 8192  # elements that a program handles at a time


@triton.jit
def _moments(x, partial, places, share, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum values and squares over a share of the places."""
    worker, channel = tl.program_id(1).to(tl.int64), tl.arange(0, CHANNELS)
    x += worker * places * CHANNELS
    total, squares = tl.zeros((CHANNELS,), tl.float32), tl.zeros((CHANNELS,), tl.float32)
    begin = tl.program_id(0) * share
    for first in range(begin, begin + share, BLOCK):
        place = first + tl.arange(0, BLOCK)
        here = tl.load(x + place[:, None] * CHANNELS + channel[None, :], mask=(place < places)[:, None], other=0.0)
        here = here.to(tl.float32)
        total += tl.sum(here, 0)
        squares += tl.sum(here * here, 0)
    partial += (worker * tl.num_programs(0) + tl.program_id(0)) * 2 * CHANNELS
    tl.store(partial + channel, total)
    tl.store(partial + CHANNELS + channel, squares)


@triton.jit
def _apply(x, added, y, scale, shift, places, ADDS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Write relu(scale x + shift + added)."""
    worker, channel = tl.program_id(1).to(tl.int64), tl.arange(0, CHANNELS)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (place < places)[:, None]
    offset = worker * places * CHANNELS + place[:, None] * CHANNELS + channel[None, :]
    a, b = tl.load(scale + worker * CHANNELS + channel), tl.load(shift + worker * CHANNELS + channel)
    value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32) * a[None, :] + b[None, :]
    if ADDS:
        value += tl.load(added + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + offset, tl.maximum(value, 0.0).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _slopes(x, y, dy, mean, inverse, partial, places, share, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the gradient that passes the ReLU, and its product with the normalised values: the two parameters' own."""
    worker, channel = tl.program_id(1).to(tl.int64), tl.arange(0, CHANNELS)
    base = worker * places * CHANNELS
    mu, sigma = tl.load(mean + worker * CHANNELS + channel), tl.load(inverse + worker * CHANNELS + channel)
    total, product = tl.zeros((CHANNELS,), tl.float32), tl.zeros((CHANNELS,), tl.float32)
    begin = tl.program_id(0) * share
    for first in range(begin, begin + share, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = (place < places)[:, None]
        offset = base + place[:, None] * CHANNELS + channel[None, :]
        passed = tl.load(dy + offset, mask=inside, other=0.0).to(tl.float32)
        passed = tl.where(tl.load(y + offset, mask=inside, other=0.0) > 0, passed, 0.0)
        total += tl.sum(passed, 0)
        value = (tl.load(x + offset, mask=inside, other=0.0).to(tl.float32) - mu[None, :]) * sigma[None, :]
        product += tl.sum(passed * value, 0)
    partial += (worker * tl.num_programs(0) + tl.program_id(0)) * 2 * CHANNELS
    tl.store(partial + channel, total)
    tl.store(partial + CHANNELS + channel, product)


@triton.jit
def _back(x, y, dy, dx, dadded, a, b, c, places, ADDS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Write dx = a passed + b x + c, and the passed gradient itself where something was added."""
    worker, channel = tl.program_id(1).to(tl.int64), tl.arange(0, CHANNELS)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (place < places)[:, None]
    offset = worker * places * CHANNELS + place[:, None] * CHANNELS + channel[None, :]
    at = worker * CHANNELS + channel
    passed = tl.load(dy + offset, mask=inside, other=0.0).to(tl.float32)
    passed = tl.where(tl.load(y + offset, mask=inside, other=0.0) > 0, passed, 0.0)
    value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(a + at)[None, :] * passed + tl.load(b + at)[None, :] * value + tl.load(c + at)[None, :]
    tl.store(dx + offset, slope.to(dx.dtype.element_ty), mask=inside)
    if ADDS:
        tl.store(dadded + offset, passed.to(dx.dtype.element_ty), mask=inside)


def _shares(workers: int, places: int, block: int) -> tuple[int, int]:
    """Return into how many shares places go, and how many places one has: enough programs to fill a device."""
    shares = max(1, min(triton.cdiv(places, block), 2048 // workers))
    return shares, triton.cdiv(triton.cdiv(places, shares), block) * block


def moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and variance [worker, channel]."""
    workers, places, channels = x.shape
    block = _PLACES // channels
    shares, share = _shares(workers, places, block)
    partial = torch.empty((workers, shares, 2, channels), device=x.device)
    _moments[(shares, workers)](x, partial, places, share, CHANNELS=channels, BLOCK=block)
    mean, square = (partial.sum(1) / places).transpose(0, 1).contiguous()
    return mean, (square - mean * mean).clamp(min=0)


def apply(x: torch.Tensor, added: torch.Tensor | None, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Return relu(scale x + shift + added), scale and shift [worker, channel]."""
    workers, places, channels = x.shape
    y, block = torch.empty_like(x), _PLACES // channels
    given = x if added is None else added
    _apply[(triton.cdiv(places, block), workers)](
        x, given, y, scale, shift, places, ADDS=added is not None, CHANNELS=channels, BLOCK=block
    )
    return y


def slopes(
    x: torch.Tensor, y: torch.Tensor, dy: torch.Tensor, mean: torch.Tensor, inverse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of shift and scale [worker, channel], each worker's own."""
    workers, places, channels = x.shape
    block = _PLACES // channels
    shares, share = _shares(workers, places, block)
    partial = torch.empty((workers, shares, 2, channels), device=x.device)
    _slopes[(shares, workers)](x, y, dy, mean, inverse, partial, places, share, CHANNELS=channels, BLOCK=block)
    shift, scale = partial.sum(1).transpose(0, 1).contiguous()
    return shift, scale


def back(
    x: torch.Tensor, y: torch.Tensor, dy: torch.Tensor, line: tuple[torch.Tensor, ...], adds: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a passed + b x + c with (a, b, c) = `line`, and the passed gradient (where it `adds`; else any tensor)."""
    workers, places, channels = x.shape
    dx, block = torch.empty_like(x), _PLACES // channels
    dadded = torch.empty_like(x) if adds else dx
    _back[(triton.cdiv(places, block), workers)](
        x, y, dy, dx, dadded, *line, places, ADDS=adds, CHANNELS=channels, BLOCK=block
    )
    return dx, dadded
