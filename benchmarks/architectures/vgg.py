"""VGG-16 and VGG-19 without batch normalisation, as torchvision numbers them."""

from architectures.image import ImageStack
from architectures.layers import Layer

_WIDTHS = (64, 128, 256, 512, 512)


def vgg16() -> tuple[Layer, ...]:
    """Return the layers of VGG-16."""
    return _vgg((2, 2, 3, 3, 3))


def vgg19() -> tuple[Layer, ...]:
    """Return the layers of VGG-19."""
    return _vgg((2, 2, 4, 4, 4))


def _vgg(depths: tuple[int, ...]) -> tuple[Layer, ...]:
    stack = ImageStack()
    index = 0  # torchvision numbers every module of `features`: a convolution, its ReLU, a pooling
    for depth, width in zip(depths, _WIDTHS, strict=True):
        for _ in range(depth):
            stack.conv(f"features.{index}", width, kernel=3, bias=True)
            stack.elementwise("relu")
            index += 2
        stack.pool(2, stride=2)
        index += 1
    for number in (0, 3):
        stack.linear(f"classifier.{number}", 4096)
        stack.elementwise("relu")
        stack.elementwise("dropout")
    stack.linear("classifier.6", 1000)
    stack.elementwise("loss")
    return tuple(stack.layers)
