"""ResNet-50 and ResNet-152 for ImageNet (torchvision's names), and ResNet-20 for CIFAR-10 (He et al., section 4.2)."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.zoo.parts import begin_convolutions, class_loss, random_images
from penstock.zoo.task import RandomTask


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
    images = random_images(224, 1000)
    return RandomTask("ResNet-50", 32, "an image of 224 x 224", lambda: ResNet((3, 4, 6, 3)), images, class_loss)


def resnet152() -> RandomTask:
    """Return ResNet-152 on ImageNet."""
    images = random_images(224, 1000)
    return RandomTask("ResNet-152", 32, "an image of 224 x 224", lambda: ResNet((3, 8, 36, 3)), images, class_loss)
