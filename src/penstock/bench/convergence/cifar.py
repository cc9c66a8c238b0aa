"""ResNet-20 and VGG-16 on part of CIFAR-10."""

import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from penstock.bench.convergence import networks
from penstock.bench.convergence.tasks import Recipe, Task
from penstock.zoo.resnet import resnet20
from penstock.zoo.vgg import vgg16_cifar

_MEAN, _STD = (125.307, 122.950, 113.865), (62.993, 62.089, 66.705)  # of CIFAR-10's training set
_PAD = 4  # pixels an image may be shifted
_LOSS_SCALE = 128.0  # with float16 values
_CHANNELS = 16  # an image has three, and zeros: kernels multiply blocks of 16


def resnet20_task(data: Path, device: str, dtype: torch.dtype) -> Task:
    """Return ResNet-20: 0.27M parameters."""
    recipe = Recipe(steps=12000, learning_rate=0.1, weight_decay=5e-4, rising=400, warmup=400)
    return _cifar("resnet20", resnet20().build, networks.resnet20, recipe, 32, data, device, dtype)


def vgg16_task(data: Path, device: str, dtype: torch.dtype) -> Task:
    """Return VGG-16 with a quarter of the channels, so that many runs fit on a GPU: 0.96M parameters."""
    recipe = Recipe(steps=12000, learning_rate=0.0125, weight_decay=5e-4, rising=400, warmup=400)
    return _cifar("vgg16-quarter", _narrow_vgg16, networks.vgg16, recipe, 32, data, device, dtype)


def _narrow_vgg16() -> nn.Module:
    """Build it without dropout."""
    model = vgg16_cifar(narrower=4).build()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _cifar(
    name: str, model: Callable[[], nn.Module], forward: Callable[..., torch.Tensor], recipe: Recipe, batch_size: int,
    data: Path, device: str, dtype: torch.dtype,
) -> Task:  # fmt: skip
    images, labels = _batch(data / "cifar10" / "data_batch_1", device)
    held_images, held_labels = _batch(data / "cifar10" / "test_batch", device)
    held = held_images.permute(0, 3, 1, 2)  # channels stay last in memory, which is fastest
    padded = functional.pad(images, (0, _CHANNELS - 3, _PAD, _PAD, _PAD, _PAD)).to(dtype)

    def batch(chosen: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return shifted(padded, chosen, noise), labels[chosen]

    def accuracy(network: nn.Module) -> float:
        found = [network(part).argmax(1) for part in torch.split(held, 2000)]
        return float((torch.cat(found) == held_labels).float().mean())

    return Task(
        name, "accuracy", "higher", model, len(labels), batch, forward, accuracy, global_batch=batch_size,
        recipe=recipe, loss_scale=_LOSS_SCALE if dtype == torch.float16 else 1.0,
    )  # fmt: skip


def _batch(path: Path, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images [image, height, width, colour] and labels."""
    with lzma.open(f"{path}.images.npy.xz") as file:
        images = torch.from_numpy(np.load(file, allow_pickle=False)).to(device).float()
    mean, std = (torch.tensor(values, device=device) for values in (_MEAN, _STD))
    labels = torch.from_numpy(np.load(f"{path}.labels.npy", allow_pickle=False).astype(np.int64)).to(device)
    return (images - mean) / std, labels


def shifted(padded: torch.Tensor, chosen: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return chosen images, each shifted and mirrored as its three numbers in [0, 1) say."""
    size = padded.shape[1] - 2 * _PAD
    steps = torch.arange(size, device=padded.device)
    top, left = ((noise[..., axis] * (2 * _PAD + 1)).long()[..., None] + steps for axis in (0, 1))
    left = torch.where(noise[..., 2, None] < 0.5, left.flip(-1), left)
    return padded[chosen[..., None, None], top[..., :, None], left[..., None, :]]
