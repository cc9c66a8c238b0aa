"""Every model of the zoo, small enough to train twelve times in a test: its own classes, fewer and narrower layers."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from penstock.zoo import ZOO, RandomTask
from penstock.zoo.image_models import VGG, DenseNet, ResNet
from penstock.zoo.language_models import GPT, Bert, WordLSTM
from penstock.zoo.parts import random_images, random_text
from penstock.zoo.task import MakeBatch

BATCH = {"googlenet": 1}  # 2 for all others: normalisation wants more than one value
# In float32 some units of GoogLeNet fire on one side of a rounding error only, as nothing normalises single samples:
# on 3 workers torch's wrapper then differs from itself with other buckets by 1.2e-3, in float64 by 5.6e-17.
WIDE = ("googlenet",)


def small_task(name: str) -> RandomTask:
    """Return a model of the zoo with less to compute and to send; those that are small already as they are."""
    task = ZOO[name]()
    if name in WIDE:
        return replace(task, build=lambda: task.build().double(), make_batch=_wide(task.make_batch))
    if name not in _SMALLER:
        return task
    build, make_batch = _SMALLER[name]
    return replace(task, build=build, make_batch=make_batch)


def _wide(make_batch: MakeBatch) -> MakeBatch:
    def make(batch: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = make_batch(batch, device)
        return inputs.double(), targets

    return make


def _sentences(width: int) -> MakeBatch:
    def make(batch: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(1000, (batch, 16), device=device), torch.randn(batch, width, device=device).tanh()

    return make


def _vgg(*depths: int, normalise: bool = False) -> Callable[[], nn.Module]:
    return lambda: VGG(depths, normalise=normalise, pixels=1, hidden=32, classes=10)


_IMAGES, _LARGER = random_images(32, 10), random_images(64, 1000)
_SMALLER: dict[str, tuple[Callable[[], nn.Module], MakeBatch]] = {
    "bert_base": (lambda: Bert(24, 12, 12), _sentences(24)),
    "bert_large": (lambda: Bert(32, 24, 16), _sentences(32)),
    "densenet201": (lambda: DenseNet((2, 3, 4, 2)), _LARGER),
    "gpt2": (lambda: GPT(300, 32, width=48, depth=12, heads=12, dropout=0.1), random_text(300, 32)),
    "lstm_ptb": (lambda: WordLSTM(300, 32, 0.65), random_text(300, 35)),
    "resnet50": (lambda: ResNet((1, 1, 1, 1)), _LARGER),
    "resnet152": (lambda: ResNet((1, 1, 2, 1)), _LARGER),
    "vgg16": (_vgg(1, 1, 1, 1, 1), _IMAGES),
    "vgg16_cifar": (_vgg(1, 1, 1, 1, 1, normalise=True), _IMAGES),
    "vgg19": (_vgg(1, 1, 2, 1, 1), _IMAGES),
}
