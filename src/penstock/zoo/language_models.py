"""Language models of the papers: BERT-base and BERT-large, GPT-2 and a small GPT, LSTM-PTB."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.zoo.parts import attend, begin_transformer, next_word_loss, random_text
from penstock.zoo.task import MakeBatch, RandomTask

# BERT-base and BERT-large with the names of transformers' `BertModel`: embeddings, encoder and pooler, no heads.
# Without heads there is nothing to classify, so the task is to reproduce a teacher's sentence vectors (distillation).


_BERT_WORDS, _POSITIONS, _BERT_STEPS, _BERT_DROPOUT = 30522, 512, 128, 0.1


class Embeddings(nn.Module):
    """Words, positions and sentence numbers, added and normalised."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(_BERT_WORDS, width)
        self.position_embeddings = nn.Embedding(_POSITIONS, width)
        self.token_type_embeddings = nn.Embedding(2, width)
        self.LayerNorm, self.dropout = nn.LayerNorm(width), nn.Dropout(_BERT_DROPOUT)

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
        dropout = _BERT_DROPOUT if self.training else 0.0
        return attend(self.query(x), self.key(x), self.value(x), self.heads, causal=False, dropout=dropout)


class AddAndNorm(nn.Module):
    """A linear layer, added to what went around it, and normalised."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.dense, self.LayerNorm, self.dropout = (
            nn.Linear(inputs, width),
            nn.LayerNorm(width),
            nn.Dropout(_BERT_DROPOUT),
        )

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


class BertBlock(nn.Module):
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
        self.encoder = nn.ModuleDict({"layer": nn.Sequential(*(BertBlock(width, heads) for _ in range(depth)))})
        self.pooler = Dense(width, width, nn.Tanh())
        begin_transformer(self)

    def forward(self, words: Tensor) -> Tensor:
        """Return one vector per sequence, made of what the encoder says about its first word."""
        x = self.encoder["layer"](self.embeddings(words))
        pooled: Tensor = self.pooler(x[:, 0])
        return pooled


def _sentences(width: int) -> MakeBatch:
    def make(batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.randint(_BERT_WORDS, (batch, _BERT_STEPS), device=device), torch.randn(
            batch, width, device=device
        ).tanh()

    return make


def distillation_loss(vectors: Any, targets: Tensor) -> Tensor:
    """Return the mean squared distance to the teacher's vectors."""
    return functional.mse_loss(vectors, targets)


def bert_base() -> RandomTask:
    """Return BERT-base on sequences of 128 tokens."""
    sample = f"a sequence of {_BERT_STEPS} tokens"
    return RandomTask("BERT-base", 32, sample, lambda: Bert(768, 12, 12), _sentences(768), distillation_loss)


def bert_large() -> RandomTask:
    """Return BERT-large on sequences of 128 tokens."""
    sample = f"a sequence of {_BERT_STEPS} tokens"
    return RandomTask("BERT-large", 8, sample, lambda: Bert(1024, 24, 16), _sentences(1024), distillation_loss)


# GPT-2 with the names of transformers' `GPT2LMHeadModel`, and a small GPT over bytes that a laptop can train.


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


class GptBlock(nn.Module):
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
        self.h = nn.Sequential(*(GptBlock(width, heads, dropout) for _ in range(depth)))
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
    build = partial(GPT, 50257, 1024, width=768, depth=12, heads=12, dropout=0.1)
    return RandomTask("GPT-2", 8, "a sequence of 1024 tokens", build, random_text(50257, 1024), next_word_loss)


def gpt_small() -> RandomTask:
    """Return a GPT of 0.8M parameters over bytes, for machines without a GPU."""
    build = partial(GPT, 256, 128, width=128, depth=4, heads=4, dropout=0.0)
    return RandomTask("small GPT", 8, "a sequence of 128 bytes", build, random_text(256, 128), next_word_loss)


# LSTM-PTB: gTop-k's language model, in the large configuration of Zaremba et al. (two layers of 1,500 units).
# Names are those of PyTorch's word-language-model example. Each sequence starts from a state of zeros.


_PTB_WORDS, _HIDDEN, _PTB_STEPS, _PTB_DROPOUT = 10000, 1500, 35, 0.65


class WordLSTM(nn.Module):
    """A table of words, two LSTM layers, and an output layer with a table of its own."""

    def __init__(self, words: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.encoder, self.dropout = nn.Embedding(words, hidden), nn.Dropout(dropout)
        self.rnn = nn.LSTM(hidden, hidden, 2, batch_first=True, dropout=dropout)
        self.decoder = nn.Linear(hidden, words)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.04, 0.04)

    def forward(self, words: Tensor) -> Tensor:
        """Return one logit per word of the vocabulary and position."""
        states, _ = self.rnn(self.dropout(self.encoder(words)))
        logits: Tensor = self.decoder(self.dropout(states))
        return logits


def lstm_ptb() -> RandomTask:
    """Return LSTM-PTB on sequences of 35 words."""
    build, text = lambda: WordLSTM(_PTB_WORDS, _HIDDEN, _PTB_DROPOUT), random_text(_PTB_WORDS, _PTB_STEPS)
    return RandomTask("LSTM-PTB", 100, "a sequence of 35 words", build, text, next_word_loss)
