"""What is trained: ResNet-20 and VGG-16 on part of CIFAR-10, and a small LSTM on Penn Treebank.

Everything a step needs is on the device before training starts: the data, and for every step which examples each
worker takes. So a step has no host work, and can be captured in a CUDA graph.
"""

import lzma
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from penstock.errors import PenstockError
from penstock.zoo.resnet import resnet20
from penstock.zoo.vgg import vgg16_cifar

_MEAN, _STD = (125.307, 122.950, 113.865), (62.993, 62.089, 66.705)  # of CIFAR-10's training set
_PAD = 4  # pixels an image may be shifted


@dataclass(frozen=True, slots=True)
class Task:
    """A model, its data on the device, and how to judge it."""

    name: str
    metric: str
    better: str  # "higher" or "lower"
    model: Callable[[], nn.Module]
    examples: int  # that one epoch draws from
    batch: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # (numbers, noise) -> in, wanted
    criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (outputs, wanted) -> loss
    evaluate: Callable[[nn.Module], float]
    together: bool  # all workers' passes as one, each convolution with a group per worker
    global_batch: int
    epochs: int
    learning_rate: float
    weight_decay: float
    clip: float  # local gradient norm, over the root of the number of workers; 0: none


def make_task(name: str, data: Path, device: str) -> Task:
    """Return a task by name, its data read from below `data`."""
    if name not in _TASKS:
        raise PenstockError(f"no convergence task called {name!r}; wanted one of {', '.join(_TASKS)}")
    return _TASKS[name](data, device)


def _resnet20(data: Path, device: str) -> Task:
    return _cifar("resnet20", resnet20().build, data, device, epochs=40, learning_rate=0.05)


def _vgg16(data: Path, device: str) -> Task:
    return _cifar("vgg16", lambda: _without_dropout(vgg16_cifar().build()), data, device, epochs=30, learning_rate=0.05)


def _without_dropout(model: nn.Module) -> nn.Module:
    """Replace dropout, whose random numbers many runs at once on one device would have to share."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Dropout):
                setattr(parent, name, nn.Identity())
    return model


def _cifar(
    name: str, model: Callable[[], nn.Module], data: Path, device: str, epochs: int, learning_rate: float
) -> Task:
    images, labels = _batch(data / "cifar10" / "data_batch_1", device)
    held_images, held_labels = _batch(data / "cifar10" / "test_batch", device)
    padded = functional.pad(images, (_PAD,) * 4)

    def batch(chosen: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _shifted(padded[chosen], noise), labels[chosen]

    def accuracy(network: nn.Module) -> float:
        found = [network(part).argmax(1) for part in torch.split(held_images, 2000)]
        return float((torch.cat(found) == held_labels).float().mean())

    return Task(
        name, "accuracy", "higher", model, len(labels), batch, functional.cross_entropy, accuracy, together=True,
        global_batch=128, epochs=epochs, learning_rate=learning_rate, weight_decay=5e-4, clip=0.0,
    )  # fmt: skip


def _batch(path: Path, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    with lzma.open(f"{path}.images.npy.xz") as file:
        images = torch.from_numpy(np.load(file, allow_pickle=False)).to(device).permute(0, 3, 1, 2).float()
    mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (_MEAN, _STD))
    labels = torch.from_numpy(np.load(f"{path}.labels.npy", allow_pickle=False).astype(np.int64)).to(device)
    return ((images - mean) / std).contiguous(), labels


def _shifted(padded: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Shift and mirror each image at random; `noise` has three numbers in [0, 1) for each."""
    size = padded.shape[-1] - 2 * _PAD
    steps = torch.arange(size, device=padded.device)
    top, left = ((noise[:, axis] * (2 * _PAD + 1)).long()[:, None] + steps for axis in (0, 1))
    left = torch.where(noise[:, 2, None] < 0.5, left.flip(1), left)
    number = torch.arange(len(padded), device=padded.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[number, top[:, :, None], left[:, None, :]].permute(0, 3, 1, 2)


class SmallLSTM(nn.Module):
    """Two layers of LSTM under a word embedding; 6.2 million parameters with 10,000 words."""

    def __init__(self, words: int, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.output = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of the next word at every place."""
        logits: torch.Tensor = self.output(self.lstm(self.embedding(tokens))[0])
        return logits


_LENGTH = 35  # words of one example


def _lstm(data: Path, device: str) -> Task:
    words: dict[str, int] = {}
    train, held = (_tokens(data / "ptb" / f"ptb.{part}.txt", words).to(device) for part in ("train", "valid"))

    def windows(tokens: torch.Tensor) -> torch.Tensor:
        return tokens[: (len(tokens) - 1) // _LENGTH * _LENGTH + 1].unfold(0, _LENGTH + 1, _LENGTH)

    examples, judged = windows(train), windows(held)

    def entropy(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    def perplexity(network: nn.Module) -> float:
        total = sum(entropy(network(part[:, :-1]), part[:, 1:]) * len(part) for part in torch.split(judged, 100))
        return float(torch.as_tensor(total / len(judged)).exp())

    return Task(
        "lstm", "perplexity", "lower", lambda: SmallLSTM(len(words)), len(examples),
        lambda chosen, noise: (examples[chosen, :-1], examples[chosen, 1:]), entropy, perplexity, together=False,
        global_batch=40, epochs=6, learning_rate=2.0, weight_decay=0.0, clip=0.5,
    )  # fmt: skip


def _tokens(path: Path, words: dict[str, int]) -> torch.Tensor:
    text = path.read_text().replace("\n", " <eos> ").split()
    return torch.tensor([words.setdefault(word, len(words)) for word in text])


_TASKS: dict[str, Callable[[Path, str], Task]] = {"resnet20": _resnet20, "vgg16": _vgg16, "lstm": _lstm}
