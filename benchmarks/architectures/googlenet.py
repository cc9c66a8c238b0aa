"""GoogLeNet as Caffe trains it, the network of MG-WFBP's K80 measurements, with torchvision's names.

Convolutions carry biases, there is no batch normalisation, the third branch of an inception block has true 5x5
convolutions (torchvision's has 3x3), poolings round up, and both auxiliary classifiers are trained: 64 layers with
a weight and a bias each.
"""

from architectures.image import ImageStack
from architectures.layers import Layer

# Channels of the 1x1 branch, the 3x3 branch (reduced, full), the 5x5 branch (reduced, full), the pooled branch.
_INCEPTIONS = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
_POOL_AFTER = ("3b", "4e")
_CLASSIFIER_AFTER = {"4a": "aux1", "4d": "aux2"}


def googlenet() -> tuple[Layer, ...]:
    """Return the layers of GoogLeNet with its auxiliary classifiers."""
    stack = ImageStack()
    _stem(stack)
    for name, widths in _INCEPTIONS.items():
        _inception(stack, f"inception{name}", widths)
        if name in _POOL_AFTER:
            stack.pool(3, stride=2, ceil=True)
        if name in _CLASSIFIER_AFTER:
            _auxiliary_classifier(stack, _CLASSIFIER_AFTER[name])
    stack.pool(7, stride=1)
    stack.elementwise("dropout")
    stack.linear("fc", 1000)
    stack.elementwise("loss")
    return tuple(stack.layers)


def _stem(stack: ImageStack) -> None:
    _conv_relu(stack, "conv1", 64, kernel=7, stride=2)
    stack.pool(3, stride=2, ceil=True)
    stack.elementwise("local response norm")
    _conv_relu(stack, "conv2", 64, kernel=1)
    _conv_relu(stack, "conv3", 192, kernel=3)
    stack.elementwise("local response norm")
    stack.pool(3, stride=2, ceil=True)


def _inception(stack: ImageStack, name: str, widths: tuple[int, int, int, int, int, int]) -> None:
    one, reduce3, three, reduce5, five, pooled = widths
    channels = stack.channels
    _conv_relu(stack, f"{name}.branch1", one, kernel=1)
    stack.channels = channels
    _conv_relu(stack, f"{name}.branch2.0", reduce3, kernel=1)
    _conv_relu(stack, f"{name}.branch2.1", three, kernel=3)
    stack.channels = channels
    _conv_relu(stack, f"{name}.branch3.0", reduce5, kernel=1)
    _conv_relu(stack, f"{name}.branch3.1", five, kernel=5)
    stack.channels = channels
    stack.pool(3, stride=1, padding=1)
    _conv_relu(stack, f"{name}.branch4.1", pooled, kernel=1)
    stack.concat(one + three + five + pooled)


def _auxiliary_classifier(stack: ImageStack, name: str) -> None:
    channels, size = stack.channels, stack.size
    stack.pool(5, stride=3, ceil=True)
    _conv_relu(stack, f"{name}.conv", 128, kernel=1)
    stack.linear(f"{name}.fc1", 1024)
    stack.elementwise("relu")
    stack.elementwise("dropout")
    stack.linear(f"{name}.fc2", 1000)
    stack.elementwise("loss")
    stack.channels, stack.size = channels, size


def _conv_relu(stack: ImageStack, name: str, outputs: int, kernel: int, stride: int = 1) -> None:
    stack.conv(f"{name}.conv", outputs, kernel, stride, bias=True)
    stack.elementwise("relu")
