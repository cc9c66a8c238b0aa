"""VGG-16 and VGG-19 for ImageNet (torchvision's names), and VGG-16 for CIFAR-10 with batch normalisation."""

from torch import Tensor, nn

from penstock.zoo.parts import begin_convolutions, class_loss, random_images
from penstock.zoo.task import RandomTask

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
    images = random_images(224, 1000)
    return RandomTask("VGG-16", 32, "an image of 224 x 224", lambda: _imagenet(_SIXTEEN), images, class_loss)


def vgg19() -> RandomTask:
    """Return VGG-19 on ImageNet: 144M parameters."""
    images = random_images(224, 1000)
    return RandomTask("VGG-19", 32, "an image of 224 x 224", lambda: _imagenet(_NINETEEN), images, class_loss)


def vgg16_cifar(narrower: int = 1) -> RandomTask:
    """Return VGG-16 on CIFAR-10: 15.3M parameters, as normalised networks for small images are usually built.

    `narrower` divides the numbers of channels: 4 leaves 0.96M parameters.
    """
    images, widths = random_images(32, 10), tuple(width // narrower for width in _WIDTHS)
    return RandomTask("VGG-16 for CIFAR-10", 8, "an image of 32 x 32", lambda: _cifar(widths), images, class_loss)


def _cifar(widths: tuple[int, ...]) -> VGG:
    return VGG(_SIXTEEN, normalise=True, pixels=1, hidden=widths[-1], classes=10, widths=widths)
