"""`chars`: an LSTM that learns to write Python's manual, character by character.

The text ships with CPython (`pydoc_data.topics`, about 465,000 characters of English), so nothing is downloaded. The
last tenth is held out. One LSTM layer of 512 has 2.4 million parameters and learns within a hundred iterations.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.zoo.task import Shard

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
