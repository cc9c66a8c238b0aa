"""Image models of the papers: ResNet-20, -50 and -152, VGG-16 and VGG-19, DenseNet-201, GoogLeNet."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.zoo.parts import begin_convolutions, class_loss, random_images
from penstock.zoo.task import RandomTask


def imagenet_task(
    name: str, batch: int, build: Callable[[], nn.Module], loss: Callable[[Any, Tensor], Tensor] = class_loss
) -> RandomTask:
    """Return a model of 1,000 classes on random images as large as ImageNet's usually are."""
    return RandomTask(name, batch, "an image of 224 x 224", build, random_images(224, 1000), loss)


# ResNet-50 and ResNet-152 for ImageNet (torchvision's names), and ResNet-20 for CIFAR-10 (He et al., section 4.2).


class Bottleneck(nn.Module):
    """Three convolutions of which the middle one is narrow; the shortcut is a convolution where widths differ."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.downsample: nn.Module | None = None
        if inputs != 4 * width:
            shortcut = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """Four stages of bottlenecks over images of 224 x 224."""

    def __init__(self, depths: tuple[int, int, int, int]) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.layer1 = _stage(64, 64, depths[0], stride=1)
        self.layer2 = _stage(256, 128, depths[1], stride=2)
        self.layer3 = _stage(512, 256, depths[2], stride=2)
        self.layer4 = _stage(1024, 512, depths[3], stride=2)
        self.fc = nn.Linear(2048, 1000)
        begin_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return 1,000 logits per image."""
        x = torch.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def _stage(inputs: int, width: int, depth: int, stride: int) -> nn.Sequential:
    rest = (Bottleneck(4 * width, width, 1) for _ in range(depth - 1))
    return nn.Sequential(Bottleneck(inputs, width, stride), *rest)


class BasicBlock(nn.Module):
    """Two convolutions; the shortcut learns nothing: every other pixel, and zeros for the new channels (option A)."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.new_channels = width - inputs
        stride = 2 if self.new_channels else 1
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        if self.new_channels:
            half = self.new_channels // 2
            x = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, half, half))
        return torch.relu(x + y)


class CifarResNet(nn.Module):
    """Three stages of basic blocks over images of 32 x 32: 6 x `depth` + 2 layers that learn."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(BasicBlock(16, 16) for _ in range(depth)))
        self.layer2 = nn.Sequential(BasicBlock(16, 32), *(BasicBlock(32, 32) for _ in range(depth - 1)))
        self.layer3 = nn.Sequential(BasicBlock(32, 64), *(BasicBlock(64, 64) for _ in range(depth - 1)))
        self.fc = nn.Linear(64, 10)
        begin_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return 10 logits per image."""
        x = self.layer3(self.layer2(self.layer1(torch.relu(self.bn1(self.conv1(x))))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def resnet20() -> RandomTask:
    """Return ResNet-20 on CIFAR-10: 0.27M parameters, gTop-k's small network."""
    images = random_images(32, 10)
    return RandomTask("ResNet-20", 32, "an image of 32 x 32", lambda: CifarResNet(3), images, class_loss)


def resnet50() -> RandomTask:
    """Return ResNet-50 on ImageNet."""
    return imagenet_task("ResNet-50", 32, lambda: ResNet((3, 4, 6, 3)))


def resnet152() -> RandomTask:
    """Return ResNet-152 on ImageNet."""
    return imagenet_task("ResNet-152", 32, lambda: ResNet((3, 8, 36, 3)))


# VGG-16 and VGG-19 for ImageNet (torchvision's names), and VGG-16 for CIFAR-10 with batch normalisation.


_SIXTEEN, _NINETEEN = (2, 2, 3, 3, 3), (2, 2, 4, 4, 4)  # convolutions between two poolings
_WIDTHS = (64, 128, 256, 512, 512)


class VGG(nn.Module):
    """Stacks of 3 x 3 convolutions, then three linear layers with dropout between them."""

    def __init__(
        self, depths: tuple[int, ...], *, normalise: bool, pixels: int, hidden: int, classes: int,
        widths: tuple[int, ...] = _WIDTHS,
    ) -> None:  # fmt: skip
        super().__init__()
        self.features = nn.Sequential(*_features(depths, widths, normalise))
        first = nn.Linear(widths[-1] * pixels, hidden)  # `pixels` are left of the image after five poolings
        second = nn.Linear(hidden, hidden)
        self.classifier = nn.Sequential(
            first, nn.ReLU(), nn.Dropout(), second, nn.ReLU(), nn.Dropout(), nn.Linear(hidden, classes)
        )
        begin_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return one logit per class and image."""
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


def _features(depths: tuple[int, ...], widths: tuple[int, ...], normalise: bool) -> list[nn.Module]:
    layers: list[nn.Module] = []
    channels = 3
    for depth, width in zip(depths, widths, strict=True):
        for _ in range(depth):
            layers.append(nn.Conv2d(channels, width, 3, padding=1))
            layers += [nn.BatchNorm2d(width), nn.ReLU()] if normalise else [nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return layers


def _imagenet(depths: tuple[int, ...]) -> VGG:
    return VGG(depths, normalise=False, pixels=49, hidden=4096, classes=1000)


def vgg16() -> RandomTask:
    """Return VGG-16 on ImageNet: 138M parameters."""
    return imagenet_task("VGG-16", 32, lambda: _imagenet(_SIXTEEN))


def vgg19() -> RandomTask:
    """Return VGG-19 on ImageNet: 144M parameters."""
    return imagenet_task("VGG-19", 32, lambda: _imagenet(_NINETEEN))


def vgg16_cifar() -> RandomTask:
    """Return VGG-16 on CIFAR-10: 15.3M parameters, as normalised networks for small images are usually built."""
    images = random_images(32, 10)
    return RandomTask("VGG-16 for CIFAR-10", 8, "an image of 32 x 32", _cifar, images, class_loss)


def _cifar() -> VGG:
    return VGG(_SIXTEEN, normalise=True, pixels=1, hidden=_WIDTHS[-1], classes=10)


# DenseNet-201 for ImageNet, with torchvision's names.


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
    return imagenet_task("DenseNet-201", 64, lambda: DenseNet((6, 12, 48, 32)))


# GoogLeNet as Caffe trained it: biases, no batch normalisation, two auxiliary classifiers.
# Its two local response normalisations are left out: they learn nothing, and are no longer used.


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
    return imagenet_task("GoogLeNet", 64, GoogLeNet, weighted_loss)
