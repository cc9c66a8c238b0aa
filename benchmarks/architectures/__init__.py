"""Ten architectures of the papers, described without torch: what they learn and what their passes compute.

`ARCHITECTURES` maps a trace's name to its description. Batches are MG-WFBP's (Table 4) for ResNet-50,
DenseNet-201 and GoogLeNet, gTop-k's (Table V) for LSTM-PTB, and otherwise what people train with on one GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass

from architectures.bert import bert_base, bert_large
from architectures.densenet import densenet201
from architectures.googlenet import googlenet
from architectures.gpt2 import gpt2
from architectures.layers import Layer, Parameter, Work
from architectures.lstm_ptb import lstm_ptb
from architectures.resnet import resnet50, resnet152
from architectures.vgg import vgg16, vgg19


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model as a trace describes it."""

    model: str  # as a person writes it
    batch: int  # samples per worker and iteration
    sample: str  # what one sample is
    layers: Callable[[], tuple[Layer, ...]]  # in forward order


_IMAGE = "an image of 224 x 224"
ARCHITECTURES = {
    "bert_base": Architecture("BERT-base", 32, "a sequence of 128 tokens", bert_base),
    "bert_large": Architecture("BERT-large", 8, "a sequence of 128 tokens", bert_large),
    "densenet201": Architecture("DenseNet-201", 64, _IMAGE, densenet201),
    "googlenet": Architecture("GoogLeNet", 64, _IMAGE, googlenet),
    "gpt2": Architecture("GPT-2", 8, "a sequence of 1024 tokens", gpt2),
    "lstm_ptb": Architecture("LSTM-PTB", 100, "a sequence of 35 words", lstm_ptb),
    "resnet152": Architecture("ResNet-152", 32, _IMAGE, resnet152),
    "resnet50": Architecture("ResNet-50", 32, _IMAGE, resnet50),
    "vgg16": Architecture("VGG-16", 32, _IMAGE, vgg16),
    "vgg19": Architecture("VGG-19", 32, _IMAGE, vgg19),
}

__all__ = ["ARCHITECTURES", "Architecture", "Layer", "Parameter", "Work"]
