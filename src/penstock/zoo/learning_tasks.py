"""The tasks that learn something: text by an LSTM (`chars`) or a GPT (`chars_gpt`), and images (`digits`)."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import TaskError
from penstock.zoo.language_models import GPT
from penstock.zoo.task import Shard

# `chars`: an LSTM that learns to write Python's manual, character by character.
# The text ships with CPython (`pydoc_data.topics`, about 465,000 characters of English), so nothing is downloaded. The
# last tenth is held out. One LSTM layer of 512 has 2.4 million parameters and learns within a hundred iterations.


HELD_OUT = 0.1  # of the text: its end
BYTES = 256  # one symbol per byte of UTF-8; nearly all characters of the text are one byte
EVALUATION_WINDOWS = 192  # evenly spread over the held-out text; all of it would take longer than the training


class CharLSTM(nn.Module):
    """A table of characters, LSTM layers and an output layer."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(BYTES, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.output = nn.Linear(width, BYTES)

    def forward(self, characters: Tensor) -> Tensor:
        """Return one logit per symbol and position."""
        states, _ = self.lstm(self.table(characters))
        logits: Tensor = self.output(states)
        return logits


@dataclass(frozen=True, slots=True)
class Chars:
    """The language model on Python's own manual."""

    width: int = 512
    layers: int = 1
    window: int = 32  # characters of one sample
    batch: int = 8
    learning_rate: float = 6e-3
    name: str = "chars"
    metric_name: str = "held-out bits per character"

    @property
    def samples(self) -> int:
        """Windows that the training text holds side by side."""
        return len(_split_text()[0]) // self.window

    def model(self) -> nn.Module:
        """Return a fresh LSTM."""
        return CharLSTM(self.width, self.layers)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(parameters, lr=self.learning_rate, betas=(0.9, 0.95))

    def batches(self, shard: Shard, start: int) -> Iterator[Tensor]:
        """Yield random windows; batch number n depends on seed, rank and n alone."""
        text, _ = _split_text()
        number = start
        while True:
            generator = torch.Generator().manual_seed(_mix(shard.seed, shard.rank, number))
            starts = torch.randint(len(text) - self.window - 1, (shard.batch,), generator=generator)
            yield windows(text, starts.tolist(), self.window)
            number += 1

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the cross entropy of the next character, in nats."""
        logits = model(batch[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def evaluate(self, model: nn.Module, shard: Shard) -> tuple[float, float]:
        """Return bits and characters of this worker's share of the held-out windows."""
        _, text = _split_text()
        step = (len(text) - self.window - 1) // EVALUATION_WINDOWS
        starts = [index * step for index in range(shard.rank, EVALUATION_WINDOWS, shard.world_size)]
        if not starts:
            return 0.0, 0.0
        batch = windows(text, starts, self.window).to(next(model.parameters()).device)
        count = len(starts) * self.window
        return self.loss(model, batch).item() * count / math.log(2), count


@dataclass(frozen=True, slots=True)
class CharsGpt(Chars):
    """The same text by a GPT of 3.2 million parameters with AdamW: what most people train, in small."""

    width: int = 256
    layers: int = 4
    batch: int = 4
    learning_rate: float = 1e-3
    name: str = "chars_gpt"

    def model(self) -> nn.Module:
        """Return a fresh GPT."""
        return GPT(BYTES, self.window, width=self.width, depth=self.layers, heads=4, dropout=0.0)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(parameters, lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)


def windows(text: Tensor, starts: list[int], width: int) -> Tensor:
    """Return `width` + 1 characters from each start: inputs, and the same one further on as targets."""
    return torch.stack([text[start : start + width + 1] for start in starts]).long()


def _mix(seed: int, rank: int, number: int) -> int:
    """Return a seed for a batch of a rank; torch's generator looks at 32 bits of it, so all three go into those."""
    return crc32(f"{seed} {rank} {number}".encode())


def _split_text() -> tuple[Tensor, Tensor]:
    """Return the bytes to train on and those held out."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    every = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = round(len(every) * (1 - HELD_OUT))
    return every[:cut], every[cut:]


# `digits`: a small convolutional network on scikit-learn's 1,797 handwritten digits (extra `digits`).
# One in five is held out. The metric is the share of those that the network reads right.


HELD_OUT_EVERY = 5
Images = tuple[Tensor, Tensor]  # images and their labels


def network() -> nn.Module:
    """Return two convolutions and two linear layers; 0.3 million parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 16, 256),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(256, 10),
    )


@dataclass(frozen=True, slots=True)
class Digits:
    """Handwritten digits."""

    batch: int = 16
    learning_rate: float = 0.05
    name: str = "digits"
    metric_name: str = "held-out accuracy"

    @property
    def samples(self) -> int:
        """Digits to train on."""
        return len(_digits(held_out=False)[1])

    def model(self) -> nn.Module:
        """Return a fresh network."""
        return network()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=0.9)

    def batches(self, shard: Shard, start: int) -> Iterator[Images]:
        """Yield shuffled batches; ranks take turns in one order that is drawn anew for each epoch."""
        images, labels = _digits(held_out=False)
        together = min(shard.batch * shard.world_size, len(labels))
        per_epoch = len(labels) // together
        number = start
        while True:
            epoch, place = divmod(number, per_epoch)
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(shard.seed + epoch))
            mine = order[place * together + shard.rank : (place + 1) * together : shard.world_size]
            yield images[mine], labels[mine]
            number += 1

    def loss(self, model: nn.Module, batch: Images) -> Tensor:
        """Return the cross entropy of the labels."""
        return functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module, shard: Shard) -> tuple[float, float]:
        """Return how many of this worker's held-out digits are read right, and how many there are."""
        images, labels = (part[shard.rank :: shard.world_size] for part in _digits(held_out=True))
        if not len(labels):
            return 0.0, 0.0
        device = next(model.parameters()).device
        right = model(images.to(device)).argmax(1) == labels.to(device)
        return float(right.sum()), len(labels)


@lru_cache(maxsize=2)
def _digits(held_out: bool) -> Images:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise TaskError(
            "task 'digits' needs scikit-learn, which is not here; `pip install 'penstock[digits]'`"
        ) from None
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16.0
    labels = torch.tensor(found.target, dtype=torch.long)
    chosen = (torch.arange(len(labels)) % HELD_OUT_EVERY == 0) == held_out
    return images[chosen], labels[chosen]
