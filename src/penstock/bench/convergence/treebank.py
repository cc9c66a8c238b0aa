"""A small LSTM on Penn Treebank's commonest words."""

from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from penstock.bench.convergence import networks
from penstock.bench.convergence.tasks import Recipe, Task

_LENGTH = 35  # words of one example
_WORDS = 2000  # that are told apart, so that a step is small and there can be many


class SmallLSTM(nn.Module):
    """Two layers of LSTM; words have the same vectors on both sides: 0.52 million parameters with 2,000 words."""

    def __init__(self, words: int, width: int = 128) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.output = nn.Linear(width, words)
        nn.init.uniform_(self.output.weight, -0.1, 0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of the next word at every place."""
        logits: torch.Tensor = self.output(self.lstm(functional.embedding(tokens, self.output.weight))[0])
        return logits


def lstm_task(data: Path, device: str, dtype: torch.dtype) -> Task:
    """Return the task of predicting the next word; held-out words are the corpus's validation part."""
    train, held = (_words(data / "ptb" / f"ptb.{part}.txt") for part in ("train", "valid"))
    numbers = {word: number for number, (word, _) in enumerate(Counter(train).most_common(_WORDS))}

    def tokens(words: list[str]) -> torch.Tensor:
        return torch.tensor([numbers.get(word, numbers["<unk>"]) for word in words], device=device)

    return language_task(tokens(train), tokens(held), len(numbers), dtype)


def language_task(
    train: torch.Tensor, held: torch.Tensor, words: int, dtype: torch.dtype, width: int = 128
) -> Task:  # fmt: skip
    """Return the task over these numbers of words."""
    examples, judged = _windows(train), _windows(held)

    def batch(chosen: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = examples[chosen]
        return both[..., :-1], both[..., 1:].flatten(2)

    def forward(tokens: torch.Tensor, of: networks.Parameters, seen: networks.Statistics) -> torch.Tensor:
        return networks.lstm(tokens, of, dropout=0.2, dtype=dtype)

    def perplexity(network: nn.Module) -> float:
        parts = torch.split(judged, 200)
        sums = [
            functional.cross_entropy(network(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()) * len(part)
            for part in parts
        ]
        return float((torch.stack(sums).sum() / len(judged)).exp())

    recipe = Recipe(steps=5000, learning_rate=8.0, weight_decay=0.0, rising=264, warmup=264, clip=0.5)
    return Task(
        "lstm", "perplexity", "lower", lambda: SmallLSTM(words, width), len(examples), batch, forward, perplexity,
        global_batch=16, recipe=recipe,
    )  # fmt: skip


def _windows(tokens: torch.Tensor) -> torch.Tensor:
    return tokens[: (len(tokens) - 1) // _LENGTH * _LENGTH + 1].unfold(0, _LENGTH + 1, _LENGTH)


def _words(path: Path) -> list[str]:
    return path.read_text().replace("\n", " <eos> ").split()
