"""GPT-2 with the names of transformers' `GPT2LMHeadModel`, and a small GPT over bytes that a laptop can train."""

import torch
from torch import Tensor, nn

from penstock.zoo.parts import attend, begin_transformer, next_word_loss, random_text
from penstock.zoo.task import RandomTask


class TransposedLinear(nn.Module):
    """A linear layer whose weight is stored as inputs x outputs, as OpenAI's code does."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return x weight + bias."""
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


class CausalAttention(nn.Module):
    """Attention of each word over itself and the words before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.c_attn, self.c_proj = TransposedLinear(width, 3 * width), TransposedLinear(width, width)
        self.heads, self.dropout = heads, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to the stream."""
        query, key, value = self.c_attn(x).chunk(3, -1)
        dropout = self.dropout.p if self.training else 0.0
        y: Tensor = self.dropout(self.c_proj(attend(query, key, value, self.heads, causal=True, dropout=dropout)))
        return y


class FeedForward(nn.Module):
    """Two linear layers, the hidden one four times as wide."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.c_fc, self.c_proj = TransposedLinear(width, 4 * width), TransposedLinear(4 * width, width)
        self.activation, self.dropout = nn.GELU(approximate="tanh"), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to the stream."""
        y: Tensor = self.dropout(self.c_proj(self.activation(self.c_fc(x))))
        return y


class Block(nn.Module):
    """Attention, then the feed-forward layers, each normalised before and added to the stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), CausalAttention(width, heads, dropout)
        self.ln_2, self.mlp = nn.LayerNorm(width), FeedForward(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after this block."""
        x = x + self.attn(self.ln_1(x))
        y: Tensor = x + self.mlp(self.ln_2(x))
        return y


class Transformer(nn.Module):
    """The blocks between the table of words and the last normalisation."""

    def __init__(self, words: int, positions: int, width: int, depth: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(words, width), nn.Embedding(positions, width), nn.Dropout(dropout)
        self.h = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, words: Tensor) -> Tensor:
        """Return one vector per position."""
        x = self.wte(words) + self.wpe(torch.arange(words.shape[1], device=words.device))
        y: Tensor = self.ln_f(self.h(self.drop(x)))
        return y


class GPT(nn.Module):
    """The transformer and its output layer, which shares the table of words."""

    def __init__(self, words: int, positions: int, width: int, depth: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.transformer = Transformer(words, positions, width, depth, heads, dropout)
        self.lm_head = nn.Linear(width, words, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        begin_transformer(self)

    def forward(self, words: Tensor) -> Tensor:
        """Return one logit per word of the vocabulary and position."""
        logits: Tensor = self.lm_head(self.transformer(words))
        return logits


def gpt2() -> RandomTask:
    """Return GPT-2 (124M parameters) on sequences of 1,024 tokens."""
    text = random_text(50257, 1024)
    return RandomTask("GPT-2", 8, "a sequence of 1024 tokens", _gpt2, text, next_word_loss)


def _gpt2() -> GPT:
    return GPT(50257, 1024, width=768, depth=12, heads=12, dropout=0.1)


def gpt_small() -> RandomTask:
    """Return a GPT of 0.8M parameters over bytes, for machines without a GPU."""
    text = random_text(256, 128)
    return RandomTask("small GPT", 8, "a sequence of 128 bytes", _gpt_small, text, next_word_loss)


def _gpt_small() -> GPT:
    return GPT(256, 128, width=128, depth=4, heads=4, dropout=0.0)
