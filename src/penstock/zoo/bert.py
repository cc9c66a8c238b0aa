"""BERT-base and BERT-large with the names of transformers' `BertModel`: embeddings, encoder and pooler, no heads.

Without heads there is nothing to classify, so the task is to reproduce a teacher's sentence vectors (distillation).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.zoo.parts import attend, begin_transformer
from penstock.zoo.task import MakeBatch, RandomTask

_WORDS, _POSITIONS, _STEPS, _DROPOUT = 30522, 512, 128, 0.1


class Embeddings(nn.Module):
    """Words, positions and sentence numbers, added and normalised."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(_WORDS, width)
        self.position_embeddings = nn.Embedding(_POSITIONS, width)
        self.token_type_embeddings = nn.Embedding(2, width)
        self.LayerNorm, self.dropout = nn.LayerNorm(width), nn.Dropout(_DROPOUT)

    def forward(self, words: Tensor) -> Tensor:
        """Return one vector per position; every word belongs to the first sentence."""
        x = self.word_embeddings(words) + self.token_type_embeddings(torch.zeros_like(words))
        x = x + self.position_embeddings(torch.arange(words.shape[1], device=words.device))
        normalised: Tensor = self.dropout(self.LayerNorm(x))
        return normalised


class SelfAttention(nn.Module):
    """Three projections and what the heads make of them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended vectors."""
        dropout = _DROPOUT if self.training else 0.0
        return attend(self.query(x), self.key(x), self.value(x), self.heads, causal=False, dropout=dropout)


class AddAndNorm(nn.Module):
    """A linear layer, added to what went around it, and normalised."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.dense, self.LayerNorm, self.dropout = nn.Linear(inputs, width), nn.LayerNorm(width), nn.Dropout(_DROPOUT)

    def forward(self, x: Tensor, around: Tensor) -> Tensor:
        """Return the normalised sum."""
        normalised: Tensor = self.LayerNorm(self.dropout(self.dense(x)) + around)
        return normalised


class Attention(nn.Module):
    """Self-attention and its output layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.self, self.output = SelfAttention(width, heads), AddAndNorm(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's first half."""
        half: Tensor = self.output(self.self(x), x)
        return half


class Dense(nn.Module):
    """A linear layer under the name `dense`, and its activation."""

    def __init__(self, inputs: int, outputs: int, activation: nn.Module) -> None:
        super().__init__()
        self.dense, self.activation = nn.Linear(inputs, outputs), activation

    def forward(self, x: Tensor) -> Tensor:
        """Return the activated product."""
        y: Tensor = self.activation(self.dense(x))
        return y


class Block(nn.Module):
    """One layer of the encoder."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.intermediate, self.output = Dense(width, 4 * width, nn.GELU()), AddAndNorm(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        x = self.attention(x)
        y: Tensor = self.output(self.intermediate(x), x)
        return y


class Bert(nn.Module):
    """The encoder; returns the vector of each sentence."""

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embeddings = Embeddings(width)
        self.encoder = nn.ModuleDict({"layer": nn.Sequential(*(Block(width, heads) for _ in range(depth)))})
        self.pooler = Dense(width, width, nn.Tanh())
        begin_transformer(self)

    def forward(self, words: Tensor) -> Tensor:
        """Return one vector per sequence, made of what the encoder says about its first word."""
        x = self.encoder["layer"](self.embeddings(words))
        pooled: Tensor = self.pooler(x[:, 0])
        return pooled


def _sentences(width: int) -> MakeBatch:
    def make(batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.randint(_WORDS, (batch, _STEPS), device=device), torch.randn(batch, width, device=device).tanh()

    return make


def distillation_loss(vectors: Any, targets: Tensor) -> Tensor:
    """Return the mean squared distance to the teacher's vectors."""
    return functional.mse_loss(vectors, targets)


def bert_base() -> RandomTask:
    """Return BERT-base on sequences of 128 tokens."""
    sample = f"a sequence of {_STEPS} tokens"
    return RandomTask("BERT-base", 32, sample, lambda: Bert(768, 12, 12), _sentences(768), distillation_loss)


def bert_large() -> RandomTask:
    """Return BERT-large on sequences of 128 tokens."""
    sample = f"a sequence of {_STEPS} tokens"
    return RandomTask("BERT-large", 8, sample, lambda: Bert(1024, 24, 16), _sentences(1024), distillation_loss)
