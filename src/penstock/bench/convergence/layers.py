"""Layers of many runs at once, with a weight gradient for each worker.

A parameter is given as [run, worker, ...]: one run's workers have the same values (an expanded view), and yet each
has a gradient of its own, which is what is exchanged. Values are of any type, parameters and their gradients float32.
"""

from typing import Any

import torch
from torch.autograd import Function

from penstock.bench.convergence import triton_convolution, triton_normalisation

EPSILON = 1e-5  # of batch normalisation, as torch has it


class Convolution(Function):
    """A 3 x 3 convolution without bias of [run, worker, image, height, width, channel]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor, stride: int) -> torch.Tensor:
        """Convolve with weights [run, worker, 9, input, output]; inputs beyond the weights' have zero weight."""
        shared = weights[:, 0].to(x.dtype)
        missing = x.shape[-1] - weights.shape[3]
        shared = torch.nn.functional.pad(shared, (0, 0, 0, missing)) if missing else shared.contiguous()
        ctx.save_for_backward(x, shared)
        ctx.stride, ctx.inputs = stride, weights.shape[3]
        y: torch.Tensor = triton_convolution.convolve(x.flatten(1, 2), shared, stride).unflatten(1, x.shape[1:3])
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, None]:
        """Return gradients of the input and of every worker's weights."""
        x, shared = ctx.saved_tensors
        dy = dy.contiguous()
        weights = triton_convolution.weigh(x.flatten(0, 1), dy.flatten(0, 1), ctx.stride)
        weights = weights.unflatten(0, x.shape[:2])[:, :, :, : ctx.inputs]
        dx = None
        if ctx.needs_input_grad[0]:
            turned = shared.flip(1).transpose(2, 3).contiguous()  # taps in reverse order, channels changed over
            spread = _spread(dy, ctx.stride).flatten(1, 2)
            dx = triton_convolution.convolve(spread, turned, 1).unflatten(1, x.shape[1:3])
        return dx, weights, None


def _spread(dy: torch.Tensor, stride: int) -> torch.Tensor:
    """Put `stride - 1` zeros between pixels: what a strided convolution left out had no influence."""
    if stride == 1:
        return dy
    *head, rows, columns, channels = dy.shape
    wide = torch.zeros((*head, rows * stride, columns * stride, channels), device=dy.device, dtype=dy.dtype)
    wide[..., ::stride, ::stride, :] = dy
    return wide


class NormalisedReLU(Function):
    """relu(batch_norm(x) + added), each worker with its own statistics; also returns mean and unbiased variance."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, added: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalise; scale and shift are [run, worker, channel]."""
        flat = x.flatten(2, 4).flatten(0, 1)
        mean, variance = triton_normalisation.moments(flat)
        inverse = (variance + EPSILON).rsqrt()
        factor = scale.flatten(0, 1) * inverse
        other = None if added is None else added.flatten(2, 4).flatten(0, 1)
        y = triton_normalisation.apply(flat, other, factor, shift.flatten(0, 1) - mean * factor)
        ctx.save_for_backward(flat, y, mean, inverse, factor)
        ctx.shape, ctx.adds = x.shape, added is not None
        unbiased = variance * (flat.shape[1] / max(1, flat.shape[1] - 1))
        ctx.mark_non_differentiable(mean, unbiased)
        return y.view(x.shape), mean, unbiased

    @staticmethod
    def backward(
        ctx: Any, dy: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return gradients of the input, both parameters, and what was added."""
        x, y, mean, inverse, factor = ctx.saved_tensors
        flat = dy.contiguous().view(x.shape)
        shift, scale = triton_normalisation.slopes(x, y, flat, mean, inverse)
        b = -factor * inverse * scale / x.shape[1]
        line = (factor, b, -factor * shift / x.shape[1] - b * mean)
        dx, dadded = triton_normalisation.back(x, y, flat, line, ctx.adds)
        head = ctx.shape[:2]
        return (
            dx.view(ctx.shape),
            scale.unflatten(0, head),
            shift.unflatten(0, head),
            dadded.view(ctx.shape) if ctx.adds else None,
        )


class Linear(Function):
    """x w^T of [run, worker, place, input] with weights [run, worker, output, input]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Multiply, in the type of `x`."""
        shared = weights[:, 0].to(x.dtype)
        ctx.save_for_backward(x, shared)
        y: torch.Tensor = torch.bmm(x.flatten(1, 2), shared.transpose(1, 2)).unflatten(1, x.shape[1:3])
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gradients of the input and of every worker's weights."""
        x, shared = ctx.saved_tensors
        dx = torch.bmm(dy.flatten(1, 2), shared).unflatten(1, x.shape[1:3])
        return dx, product(dy.flatten(0, 1).transpose(1, 2), x.flatten(0, 1)).unflatten(0, x.shape[:2])


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply matrices and leave the sums in float32: rounding them would make many gradients equal."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())
