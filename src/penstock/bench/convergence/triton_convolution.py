"""3 x 3 convolutions of many runs at once: every run has its own weights, every worker its own weight gradient.

Libraries run a convolution per run, or a grouped one at a fraction of the device's speed. Here a launch does all runs.
Images are [run, image, height, width, channel], weights [run, tap, input, output]; channels are powers of two of at
least 16. Products are of the type of the values (bfloat16), sums float32.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _convolve(x, weights, y, images, height, width, rows, columns, stride, inputs, outputs,
              PIXELS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr):  # fmt: skip
    """Compute a block of output pixels and channels of one run: one product per tap and block of input channels."""
    run = tl.program_id(2).to(tl.int64)
    x += run * images * height * width * inputs
    y += run * images * rows * columns * outputs
    weights += run * 9 * inputs * outputs
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    inside = pixel < images * rows * columns
    column, row, image = pixel % columns, pixel // columns % rows, pixel // (columns * rows)
    given, wanted = tl.arange(0, INPUTS), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    total = tl.zeros((PIXELS, OUTPUTS), tl.float32)
    for number in range(0, 9 * inputs, INPUTS):  # one loop, so that loads of the next product overlap this one
        tap, first = number // inputs, number % inputs
        i, j = row * stride + tap // 3 - 1, column * stride + tap % 3 - 1
        there = inside & (i >= 0) & (i < height) & (j >= 0) & (j < width)
        place = x + ((image * height + i) * width + j)[:, None] * inputs + first + given[None, :]
        left = tl.load(place, mask=there[:, None], other=0.0)
        total = tl.dot(left, tl.load(weights + (number + given)[:, None] * outputs + wanted[None, :]), total)
    tl.store(y + pixel[:, None] * outputs + wanted[None, :], total.to(y.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _weigh(x, dy, partial, images, height, width, rows, columns, stride, outputs, share,
           inputs: tl.constexpr, PIXELS: tl.constexpr, TAPPED: tl.constexpr, OUTPUTS: tl.constexpr):  # fmt: skip
    """Sum one worker's weight gradient over a share of its pixels; a row of the result is a tap's input channel."""
    blocks = tl.cdiv(outputs, OUTPUTS)
    tapped = tl.program_id(0) // blocks * TAPPED + tl.arange(0, TAPPED)
    wanted = tl.program_id(0) % blocks * OUTPUTS + tl.arange(0, OUTPUTS)
    worker = tl.program_id(2).to(tl.int64)
    x += worker * images * height * width * inputs
    dy += worker * images * rows * columns * outputs
    partial += (worker * tl.num_programs(1) + tl.program_id(1)) * 9 * inputs * outputs
    tap, given = tapped // inputs, tapped % inputs
    exists = tapped < 9 * inputs
    total = tl.zeros((TAPPED, OUTPUTS), tl.float32)
    begin = tl.program_id(1) * share
    for first in range(begin, begin + share, PIXELS):
        pixel = first + tl.arange(0, PIXELS)
        inside = pixel < images * rows * columns
        column, row, image = pixel % columns, pixel // columns % rows, pixel // (columns * rows)
        i = row[None, :] * stride + (tap // 3)[:, None] - 1
        j = column[None, :] * stride + (tap % 3)[:, None] - 1
        there = inside[None, :] & exists[:, None] & (i >= 0) & (i < height) & (j >= 0) & (j < width)
        left = tl.load(x + ((image[None, :] * height + i) * width + j) * inputs + given[:, None], mask=there, other=0.0)
        right = tl.load(dy + pixel[:, None] * outputs + wanted[None, :], mask=inside[:, None], other=0.0)
        total = tl.dot(left, right, total)
    tl.store(partial + tapped[:, None] * outputs + wanted[None, :], total, mask=exists[:, None])


def convolve(x: torch.Tensor, weights: torch.Tensor, stride: int) -> torch.Tensor:
    """Return the convolution of [run, image, height, width, input] with [run, 9, input, output], edges padded."""
    runs, images, height, width, inputs = x.shape
    outputs, rows, columns = weights.shape[3], height // stride, width // stride
    y = torch.empty((runs, images, rows, columns, outputs), device=x.device, dtype=x.dtype)
    block = min(outputs, 128)
    grid = (triton.cdiv(images * rows * columns, 128), outputs // block, runs)
    _convolve[grid](
        x, weights, y, images, height, width, rows, columns, stride, inputs, outputs,
        PIXELS=128, INPUTS=min(inputs, 64), OUTPUTS=block, num_warps=4 if block < 128 else 8,
    )  # fmt: skip
    return y


def weigh(x: torch.Tensor, dy: torch.Tensor, stride: int) -> torch.Tensor:
    """Return the weight gradient [worker, 9, input, output] of [worker, image, height, width, channel]."""
    workers, images, height, width, inputs = x.shape
    rows, columns, outputs = dy.shape[2:]
    block, tapped = min(outputs, 64), 64
    tiles, pixels = triton.cdiv(9 * inputs, tapped) * (outputs // block), images * rows * columns
    shares = max(1, min(pixels // 512, 2048 // (tiles * workers)))  # enough programs to fill a device
    share = triton.cdiv(triton.cdiv(pixels, shares), 64) * 64
    partial = torch.empty((workers, shares, 9, inputs, outputs), device=x.device)
    _weigh[(tiles, shares, workers)](
        x, dy, partial, images, height, width, rows, columns, stride, outputs, share,
        inputs=inputs, PIXELS=64, TAPPED=tapped, OUTPUTS=block, num_warps=4,
    )  # fmt: skip
    return partial.sum(1) if shares > 1 else partial.squeeze(1)
