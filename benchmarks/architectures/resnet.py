"""ResNet-50 and ResNet-152 with bottleneck blocks, stride on the 3x3 convolution, as torchvision names them."""

from architectures.image import ImageStack
from architectures.layers import Layer

_WIDTHS = (64, 128, 256, 512)
_EXPANSION = 4  # a block's output is four times as wide as its inside


def resnet50() -> tuple[Layer, ...]:
    """Return the layers of ResNet-50."""
    return _resnet((3, 4, 6, 3))


def resnet152() -> tuple[Layer, ...]:
    """Return the layers of ResNet-152."""
    return _resnet((3, 8, 36, 3))


def _resnet(depths: tuple[int, ...]) -> tuple[Layer, ...]:
    stack = ImageStack()
    _conv_norm(stack, "conv1", "bn1", 64, kernel=7, stride=2)
    stack.elementwise("relu")
    stack.pool(3, stride=2, padding=1)
    for stage, (depth, width) in enumerate(zip(depths, _WIDTHS, strict=True), start=1):
        for block in range(depth):
            _bottleneck(stack, f"layer{stage}.{block}", width, stride=2 if stage > 1 and block == 0 else 1)
    stack.pool(7, stride=7)
    stack.linear("fc", 1000)
    stack.elementwise("loss")
    return tuple(stack.layers)


def _bottleneck(stack: ImageStack, name: str, width: int, stride: int) -> None:
    channels, size = stack.channels, stack.size
    _conv_norm(stack, f"{name}.conv1", f"{name}.bn1", width, kernel=1)
    stack.elementwise("relu")
    _conv_norm(stack, f"{name}.conv2", f"{name}.bn2", width, kernel=3, stride=stride)
    stack.elementwise("relu")
    _conv_norm(stack, f"{name}.conv3", f"{name}.bn3", width * _EXPANSION, kernel=1)
    if channels != stack.channels:  # the shortcut must change shape too
        stack.channels, stack.size = channels, size
        _conv_norm(stack, f"{name}.downsample.0", f"{name}.downsample.1", width * _EXPANSION, kernel=1, stride=stride)
    stack.elementwise("add", inputs=2)
    stack.elementwise("relu")


def _conv_norm(stack: ImageStack, conv: str, norm: str, outputs: int, kernel: int, stride: int = 1) -> None:
    stack.conv(conv, outputs, kernel, stride)
    stack.batch_norm(norm)
