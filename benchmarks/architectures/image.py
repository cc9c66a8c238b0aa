"""`ImageStack`: layers of a convolutional network, written one under the other while it keeps track of shapes."""

from architectures import layers
from architectures.layers import Layer


class ImageStack:
    """The layers so far, and the `channels` and `size` of the square image that leaves the last of them.

    A branch is written by setting `channels` and `size` back to where it starts.
    """

    def __init__(self, channels: int = 3, size: int = 224) -> None:
        self.layers: list[Layer] = []
        self.channels, self.size = channels, size

    @property
    def elements(self) -> int:
        """Values per sample that leave the last layer."""
        return self.channels * self.size**2

    def conv(
        self, name: str, outputs: int, kernel: int, stride: int = 1, padding: int | None = None, bias: bool = False
    ) -> None:
        """Add a convolution; padding keeps the size at stride 1 unless given."""
        padding = kernel // 2 if padding is None else padding
        size = (self.size + 2 * padding - kernel) // stride + 1
        first = not self.layers
        self.layers.append(layers.conv(name, self.channels, self.size, outputs, kernel, size, bias=bias, first=first))
        self.channels, self.size = outputs, size

    def batch_norm(self, name: str) -> None:
        """Add a batch normalisation."""
        self.layers.append(layers.batch_norm(name, self.channels, self.elements))

    def elementwise(self, name: str, inputs: int = 1) -> None:
        """Add an activation, dropout or loss, or with two inputs a residual sum."""
        self.layers.append(layers.elementwise(name, self.elements, inputs))

    def pool(self, kernel: int, stride: int, padding: int = 0, ceil: bool = False) -> None:
        """Add a maximum or average pooling; `ceil` lets the last window hang over the edge, as Caffe does."""
        reach = self.size + 2 * padding - kernel
        size = (-(-reach // stride) if ceil else reach // stride) + 1
        outputs = self.channels * size**2
        self.layers.append(layers.resample("pool", self.elements, outputs))
        self.size = size

    def concat(self, channels: int) -> None:
        """Add a concatenation that makes an image of `channels` channels out of branches of the present size."""
        self.channels = channels
        self.layers.append(layers.resample("concat", self.elements, self.elements))

    def linear(self, name: str, outputs: int) -> None:
        """Add a linear layer over everything that comes in."""
        self.layers.append(layers.linear(name, 1, self.elements, outputs))
        self.channels, self.size = outputs, 1
