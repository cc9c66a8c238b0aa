"""DenseNet-201, as torchvision names it: each dense layer reads everything its block has made so far."""

from architectures.image import ImageStack
from architectures.layers import Layer

_GROWTH = 32  # channels each dense layer adds
_BOTTLENECK = 4 * _GROWTH  # channels between its two convolutions
_DEPTHS = (6, 12, 48, 32)


def densenet201() -> tuple[Layer, ...]:
    """Return the layers of DenseNet-201."""
    stack = ImageStack()
    stack.conv("features.conv0", 64, kernel=7, stride=2)
    _norm_relu(stack, "features.norm0")
    stack.pool(3, stride=2, padding=1)
    for block, depth in enumerate(_DEPTHS, start=1):
        for index in range(1, depth + 1):
            _dense_layer(stack, f"features.denseblock{block}.denselayer{index}")
        if block < len(_DEPTHS):
            _transition(stack, f"features.transition{block}")
    _norm_relu(stack, "features.norm5")
    stack.pool(7, stride=7)
    stack.linear("classifier", 1000)
    stack.elementwise("loss")
    return tuple(stack.layers)


def _dense_layer(stack: ImageStack, name: str) -> None:
    channels = stack.channels
    _norm_relu(stack, f"{name}.norm1")
    stack.conv(f"{name}.conv1", _BOTTLENECK, kernel=1)
    _norm_relu(stack, f"{name}.norm2")
    stack.conv(f"{name}.conv2", _GROWTH, kernel=3)
    stack.concat(channels + _GROWTH)


def _transition(stack: ImageStack, name: str) -> None:
    _norm_relu(stack, f"{name}.norm")
    stack.conv(f"{name}.conv", stack.channels // 2, kernel=1)
    stack.pool(2, stride=2)


def _norm_relu(stack: ImageStack, name: str) -> None:
    stack.batch_norm(name)
    stack.elementwise("relu")
