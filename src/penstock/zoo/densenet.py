"""DenseNet-201 for ImageNet, with torchvision's names."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from penstock.zoo.parts import begin_convolutions, class_loss, random_images
from penstock.zoo.task import RandomTask

_GROWTH = 32  # channels that each layer adds


class DenseLayer(nn.Module):
    """Adds `_GROWTH` channels computed from all channels before."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 128, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(128), nn.Conv2d(128, _GROWTH, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the channels before, and the new ones."""
        y = self.conv1(torch.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(torch.relu(self.norm2(y)))], 1)


class DenseNet(nn.Module):
    """Blocks of dense layers with transitions between them that halve the channels and the image."""

    def __init__(self, depths: tuple[int, ...]) -> None:
        super().__init__()
        parts: OrderedDict[str, nn.Module] = OrderedDict(conv0=nn.Conv2d(3, 64, 7, 2, 3, bias=False))
        parts.update(norm0=nn.BatchNorm2d(64), relu0=nn.ReLU(), pool0=nn.MaxPool2d(3, 2, 1))
        channels = 64
        for index, depth in enumerate(depths, start=1):
            parts[f"denseblock{index}"] = _block(channels, depth)
            channels += _GROWTH * depth
            if index < len(depths):
                parts[f"transition{index}"] = _transition(channels)
                channels //= 2
        parts["norm5"] = nn.BatchNorm2d(channels)
        self.features = nn.Sequential(parts)
        self.classifier = nn.Linear(channels, 1000)
        begin_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return 1,000 logits per image."""
        logits: Tensor = self.classifier(torch.relu(self.features(x)).mean((2, 3)))
        return logits


def _block(channels: int, depth: int) -> nn.Sequential:
    return nn.Sequential(OrderedDict((f"denselayer{i + 1}", DenseLayer(channels + _GROWTH * i)) for i in range(depth)))


def _transition(channels: int) -> nn.Sequential:
    shrink = nn.Conv2d(channels, channels // 2, 1, bias=False)
    parts = {"norm": nn.BatchNorm2d(channels), "relu": nn.ReLU(), "conv": shrink, "pool": nn.AvgPool2d(2)}
    return nn.Sequential(OrderedDict(parts))


def densenet201() -> RandomTask:
    """Return DenseNet-201 on ImageNet."""
    images = random_images(224, 1000)
    return RandomTask(
        "DenseNet-201", 64, "an image of 224 x 224", lambda: DenseNet((6, 12, 48, 32)), images, class_loss
    )
