"""Elements of each tensor of models that the papers count and no trace of ours has, from their definitions.

Each says whose definition it is: papers name an architecture, and only one of its implementations has their counts.
"""

Conv = tuple[int, int, int]  # channels in and out, elements of the kernel


def densenet(growth: int, start: int, depths: tuple[int, ...]) -> list[int]:
    """Return a DenseNet's for 1,000 classes (Huang et al., Table 1)."""
    sizes, channels = [3 * start * 49, start, start], start
    for block, depth in enumerate(depths):
        for _ in range(depth):
            wide = 4 * growth
            sizes += [channels, channels, channels * wide, wide, wide, wide * growth * 9]
            channels += growth
        if block < len(depths) - 1:
            sizes += [channels, channels, channels * (channels // 2)]
            channels //= 2
    return [*sizes, channels, channels, channels * 1000, 1000]


def alexnet() -> list[int]:
    """Return AlexNet's as Caffe has it (Krizhevsky et al., 2012): three of five convolutions are in two groups."""
    convolutions: list[Conv] = [(3, 96, 121), (48, 256, 25), (256, 384, 9), (192, 384, 9), (192, 256, 9)]
    linear: list[Conv] = [(9216, 4096, 1), (4096, 4096, 1), (4096, 1000, 1)]
    return [size for inputs, outputs, kernel in convolutions + linear for size in (inputs * outputs * kernel, outputs)]


_STEM: list[Conv] = [
    (3, 32, 9), (32, 32, 9), (32, 64, 9), (64, 96, 9),
    (160, 64, 1), (64, 96, 9), (160, 64, 1), (64, 64, 7), (64, 64, 7), (64, 96, 9), (192, 192, 9),
]  # fmt: skip
_A: list[Conv] = [
    (384, 96, 1), (384, 64, 1), (64, 96, 9), (384, 64, 1), (64, 96, 9), (96, 96, 9), (384, 96, 1),
]  # fmt: skip
_REDUCTION_A: list[Conv] = [(384, 384, 9), (384, 192, 1), (192, 224, 9), (224, 256, 9)]
_B: list[Conv] = [
    (1024, 384, 1), (1024, 192, 1), (192, 224, 7), (224, 256, 7), (1024, 192, 1), (192, 192, 7), (192, 224, 7),
    (224, 224, 7), (224, 256, 7), (1024, 128, 1),
]  # fmt: skip
_REDUCTION_B: list[Conv] = [
    (1024, 192, 1), (192, 192, 9), (1024, 256, 1), (256, 256, 7), (256, 320, 7), (320, 320, 9),
]  # fmt: skip
_C: list[Conv] = [
    (1536, 256, 1), (1536, 384, 1), (384, 256, 3), (384, 256, 3), (1536, 384, 1), (384, 448, 3), (448, 512, 3),
    (512, 256, 3), (512, 256, 3), (1536, 256, 1),
]  # fmt: skip


def inception_v4() -> list[int]:
    """Return Inception-v4's (Szegedy et al., 2017): convolutions, two of batch normalisation each, a classifier."""
    convolutions = [*_STEM, *4 * _A, *_REDUCTION_A, *7 * _B, *_REDUCTION_B, *3 * _C]
    sizes = [size for inputs, outputs, kernel in convolutions for size in (inputs * outputs * kernel, outputs, outputs)]
    return [*sizes, 1536 * 1000, 1000]


def resnet50_v2() -> list[int]:
    """Return ResNet-50's with normalisation before each convolution (He et al., 2016), as TensorFlow's benchmarks."""
    sizes, channels = [3 * 64 * 49, 64, 64], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            sizes += [channels, channels, channels * width, width, width, width * width * 9]
            sizes += [width, width, width * 4 * width]
            sizes += [channels * 4 * width] if block == 0 else []  # the shortcut
            channels = 4 * width
    return [*sizes, channels, channels, channels * 1000, 1000]


def bert(layers: int, width: int, vocabulary: int = 30_522) -> list[int]:
    """Return BERT's with both heads of its pretraining, the words' vectors tied to the decoder's (Devlin et al.)."""
    dense, norm = [width * width, width], [width, width]
    layer = [*4 * dense, *norm, width * 4 * width, 4 * width, 4 * width * width, width, *norm]
    return [
        vocabulary * width, 512 * width, 2 * width, *norm, *layers * layer, *dense, *dense, *norm, vocabulary,
        2 * width, 2,
    ]  # fmt: skip


def lstm_wikitext_2() -> list[int]:
    """Return those of PyTorch's example of a word language model: 1,500 units, two layers, tied, WikiText-2."""
    vocabulary, width = 33_278, 1500
    layer = [4 * width * width, 4 * width * width, 4 * width, 4 * width]
    return [vocabulary * width, *layer, *layer, vocabulary]


def transformer_base() -> list[int]:
    """Return the base Transformer's (Vaswani et al.) as in TensorFlow's official models: 33,708 subwords, shared."""
    width, inner = 512, 2048
    attention, norm = 4 * [width * width], [width, width]
    feed = [width * inner, inner, inner * width, width]
    encoder, decoder = [*attention, *norm, *feed, *norm], [*2 * [*attention, *norm], *feed, *norm]
    return [33_708 * width, *6 * encoder, *6 * decoder, *norm, *norm]


def ugatit(light: bool = False) -> list[int]:
    """Return those of U-GAT-IT (Kim et al., in PyTorch): two generators, two large and two small discriminators."""
    generator = _ugatit_generator(light)
    return [*2 * generator, *2 * _ugatit_discriminator(7), *2 * _ugatit_discriminator(5)]


def _ugatit_generator(light: bool) -> list[int]:
    wide, pixels = 256, 1 if light else 64 * 64
    sizes = [3 * 64 * 49, 64 * 128 * 9, 128 * wide * 9, *8 * [wide * wide * 9]]
    sizes += [wide, wide, 2 * wide * wide, wide]  # attention
    sizes += [pixels * wide * wide, wide * wide, wide * wide, wide * wide]
    sizes += 8 * [wide * wide * 9, wide]
    for channels in (wide, wide // 2):
        half = channels // 2
        sizes += [channels * half * 9, half, half, half]
    return [*sizes, 64 * 3 * 49]


def _ugatit_discriminator(layers: int) -> list[int]:
    sizes, inputs, outputs = list[int](), 3, 64
    for _ in range(layers - 1):
        sizes += [inputs * outputs * 16, outputs]
        inputs, outputs = outputs, 2 * outputs
    return [*sizes, inputs, inputs, 2 * inputs * inputs, inputs, inputs * 16]
