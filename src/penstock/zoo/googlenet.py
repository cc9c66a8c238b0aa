"""GoogLeNet as Caffe trained it: biases, no batch normalisation, two auxiliary classifiers.

Its two local response normalisations are left out: they learn nothing, and are no longer used.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.zoo.parts import begin_convolutions, random_images
from penstock.zoo.task import RandomTask

AUXILIARY_WEIGHT = 0.3  # of each auxiliary classifier in the loss (Szegedy et al., section 5)


class ConvReLU(nn.Module):
    """A convolution that keeps the image's size at stride 1, and its activation."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activated convolution."""
        return torch.relu(self.conv(x))


class Inception(nn.Module):
    """Four branches side by side, concatenated."""

    def __init__(self, inputs: int, one: int, reduce3: int, three: int, reduce5: int, five: int, pooled: int) -> None:
        super().__init__()
        self.branch1 = ConvReLU(inputs, one, 1)
        self.branch2 = nn.Sequential(ConvReLU(inputs, reduce3, 1), ConvReLU(reduce3, three, 3))
        self.branch3 = nn.Sequential(ConvReLU(inputs, reduce5, 1), ConvReLU(reduce5, five, 5))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, 1), ConvReLU(inputs, pooled, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the branches' channels."""
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


class Auxiliary(nn.Module):
    """A classifier in the middle of the network, only there to be trained."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.conv, self.fc1, self.fc2 = ConvReLU(inputs, 128, 1), nn.Linear(2048, 1024), nn.Linear(1024, 1000)
        self.dropout = nn.Dropout(0.7)

    def forward(self, x: Tensor) -> Tensor:
        """Return 1,000 logits per image."""
        pooled = functional.avg_pool2d(x, 5, 3, ceil_mode=True)
        logits: Tensor = self.fc2(self.dropout(torch.relu(self.fc1(self.conv(pooled).flatten(1)))))
        return logits


class GoogLeNet(nn.Module):
    """Nine inception blocks; while training, two auxiliary classifiers beside the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = ConvReLU(3, 64, 7, 2), ConvReLU(64, 64, 1), ConvReLU(64, 192, 3)
        self.inception3a = Inception(192, 64, 96, 128, 16, 32, 32)
        self.inception3b = Inception(256, 128, 128, 192, 32, 96, 64)
        self.inception4a = Inception(480, 192, 96, 208, 16, 48, 64)
        self.aux1 = Auxiliary(512)
        self.inception4b = Inception(512, 160, 112, 224, 24, 64, 64)
        self.inception4c = Inception(512, 128, 128, 256, 24, 64, 64)
        self.inception4d = Inception(512, 112, 144, 288, 32, 64, 64)
        self.aux2 = Auxiliary(528)
        self.inception4e = Inception(528, 256, 160, 320, 32, 128, 128)
        self.inception5a = Inception(832, 256, 160, 320, 32, 128, 128)
        self.inception5b = Inception(832, 384, 192, 384, 48, 128, 128)
        self.dropout, self.fc = nn.Dropout(0.4), nn.Linear(1024, 1000)
        begin_convolutions(self)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the logits, and while training those of both auxiliary classifiers after them."""
        x = _pool(self.conv1(x))
        x = _pool(self.conv3(self.conv2(x)))
        x = self.inception4a(_pool(self.inception3b(self.inception3a(x))))
        first = (self.aux1(x),) if self.training else ()
        x = self.inception4d(self.inception4c(self.inception4b(x)))
        second = (self.aux2(x),) if self.training else ()
        x = self.inception5b(self.inception5a(_pool(self.inception4e(x))))
        return (self.fc(self.dropout(x.mean((2, 3)))), *first, *second)


def _pool(x: Tensor) -> Tensor:
    return functional.max_pool2d(x, 3, 2, ceil_mode=True)


def weighted_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Return the cross entropy of the last classifier, plus a share of the auxiliary ones'."""
    last, *auxiliary = (functional.cross_entropy(logits, targets) for logits in outputs)
    return sum((AUXILIARY_WEIGHT * loss for loss in auxiliary), last)


def googlenet() -> RandomTask:
    """Return GoogLeNet on ImageNet."""
    return RandomTask("GoogLeNet", 64, "an image of 224 x 224", GoogLeNet, random_images(224, 1000), weighted_loss)
