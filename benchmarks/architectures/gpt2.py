"""GPT-2 (124M) with its language-model head (`GPT2LMHeadModel` of transformers), on 1,024 tokens per sample.

The head multiplies by the token embedding's table, so it adds work but no tensor, and the table's gradient is ready
last of all, when the embedding's own part has been added.
"""

from architectures.layers import (
    Layer,
    attention,
    elementwise,
    embedding,
    layer_norm,
    linear,
    tied_linear,
)

TOKENS = 1024
_WORDS, _WIDTH, _DEPTH, _HEADS = 50257, 768, 12, 12


def gpt2() -> tuple[Layer, ...]:
    """Return the layers of the smallest GPT-2."""
    return (
        embedding("transformer.wte", TOKENS, _WORDS, _WIDTH),
        embedding("transformer.wpe", TOKENS, TOKENS, _WIDTH),
        elementwise("add", TOKENS * _WIDTH, inputs=2),
        elementwise("dropout", TOKENS * _WIDTH),
        *(layer for index in range(_DEPTH) for layer in _block(f"transformer.h.{index}")),
        layer_norm("transformer.ln_f", TOKENS, _WIDTH),
        tied_linear("lm_head", TOKENS, _WIDTH, _WORDS),
        elementwise("loss", TOKENS * _WORDS),
    )


def _block(name: str) -> tuple[Layer, ...]:
    """Pre-norm: each half begins with a layer norm and ends with dropout and the residual sum."""
    return (
        layer_norm(f"{name}.ln_1", TOKENS, _WIDTH),
        linear(f"{name}.attn.c_attn", TOKENS, _WIDTH, 3 * _WIDTH, transposed=True),
        attention("attention", TOKENS, _WIDTH, _HEADS),
        linear(f"{name}.attn.c_proj", TOKENS, _WIDTH, _WIDTH, transposed=True),
        *_finish(),
        layer_norm(f"{name}.ln_2", TOKENS, _WIDTH),
        linear(f"{name}.mlp.c_fc", TOKENS, _WIDTH, 4 * _WIDTH, transposed=True),
        elementwise("gelu", TOKENS * 4 * _WIDTH),
        linear(f"{name}.mlp.c_proj", TOKENS, 4 * _WIDTH, _WIDTH, transposed=True),
        *_finish(),
    )


def _finish() -> tuple[Layer, ...]:
    return (elementwise("dropout", TOKENS * _WIDTH), elementwise("add", TOKENS * _WIDTH, inputs=2))
