"""ResNet-20, VGG-16 and an LSTM as functions of many runs' parameters at once.

A network gets its parameters by the names the model itself gives them, each [run, worker, ...]; convolutions' are
[run, worker, 9, input, output]. Statistics of batch normalisation go to `seen`, one (mean, variance) per layer.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from penstock.bench.convergence.layers import Convolution, Linear, NormalisedReLU
from penstock.bench.convergence.recurrence import Recurrence, Table

Parameters = Mapping[str, Tensor]
Statistics = dict[str, tuple[Tensor, Tensor]]  # by layer: mean and variance, [run x worker, channel]


def _normalised(x: Tensor, of: Parameters, seen: Statistics, layer: str, added: Tensor | None = None) -> Tensor:
    y, mean, variance = NormalisedReLU.apply(x, of[f"{layer}.weight"], of[f"{layer}.bias"], added)
    seen[layer] = (mean, variance)
    result: Tensor = y
    return result


def _linear(x: Tensor, of: Parameters, layer: str) -> Tensor:
    y: Tensor = Linear.apply(x, of[f"{layer}.weight"])
    return y + of[f"{layer}.bias"][:, :, None].to(x.dtype)


def resnet20(x: Tensor, of: Parameters, seen: Statistics) -> Tensor:
    """Return logits of [run, worker, image, height, width, channel]."""
    x = _normalised(Convolution.apply(x, of["conv1.weight"], 1), of, seen, "bn1")
    for stage in (1, 2, 3):
        for block in range(3):
            name, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            y = _normalised(Convolution.apply(x, of[f"{name}.conv1.weight"], stride), of, seen, f"{name}.bn1")
            y = Convolution.apply(y, of[f"{name}.conv2.weight"], 1)
            if stride == 2:
                half = x.shape[-1] // 2
                x = functional.pad(x[..., ::2, ::2, :], (half, half))
            x = _normalised(y, of, seen, f"{name}.bn2", x)
    return _linear(x.mean((3, 4)), of, "fc")


def vgg16(x: Tensor, of: Parameters, seen: Statistics) -> Tensor:
    """Return logits of [run, worker, image, height, width, channel]; convolutions' biases have no effect."""
    number = 0
    for depth in (2, 2, 3, 3, 3):
        for _ in range(depth):
            x = Convolution.apply(x, of[f"features.{number}.weight"], 1)
            x = _normalised(x, of, seen, f"features.{number + 1}")
            number += 3
        x = _pool(x)
        number += 1
    x = x.flatten(3)
    for layer in (0, 3):
        x = torch.relu(_linear(x, of, f"classifier.{layer}"))
    return _linear(x, of, "classifier.6")


def _pool(x: Tensor) -> Tensor:
    x = torch.maximum(x[..., ::2, :, :], x[..., 1::2, :, :])
    return torch.maximum(x[..., ::2, :], x[..., 1::2, :])


def lstm(tokens: Tensor, of: Parameters, dropout: float, dtype: torch.dtype) -> Tensor:
    """Return logits [run, worker, sequence x place, word] of the next word of [run, worker, sequence, place]."""
    x = Table.apply(tokens, of["output.weight"], dtype)
    for layer in (0, 1):
        x = functional.dropout(x, dropout).flatten(2, 3)
        given = Linear.apply(x, of[f"lstm.weight_ih_l{layer}"])
        given = given + (of[f"lstm.bias_ih_l{layer}"] + of[f"lstm.bias_hh_l{layer}"])[:, :, None].to(dtype)
        x = Recurrence.apply(given.unflatten(2, tokens.shape[2:]), of[f"lstm.weight_hh_l{layer}"])
    return _linear(functional.dropout(x, dropout).flatten(2, 3), of, "output")
