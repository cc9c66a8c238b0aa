"""BERT-base and BERT-large: the encoder with its pooler (`BertModel` of transformers), on 128 tokens per sample.

The heads of pre-training are not included. HiPress's Table 6 counts them: 420.02 MiB for BERT-base.
"""

from architectures.layers import Layer, attention, elementwise, embedding, layer_norm, linear

TOKENS = 128
_WORDS, _POSITIONS, _SEGMENTS = 30522, 512, 2


def bert_base() -> tuple[Layer, ...]:
    """Return the layers of BERT-base (uncased)."""
    return _bert(width=768, depth=12, heads=12)


def bert_large() -> tuple[Layer, ...]:
    """Return the layers of BERT-large (uncased)."""
    return _bert(width=1024, depth=24, heads=16)


def _bert(width: int, depth: int, heads: int) -> tuple[Layer, ...]:
    blocks = (layer for index in range(depth) for layer in _block(f"encoder.layer.{index}", width, heads))
    return (
        embedding("embeddings.word_embeddings", TOKENS, _WORDS, width),
        embedding("embeddings.token_type_embeddings", TOKENS, _SEGMENTS, width),
        elementwise("add", TOKENS * width, inputs=2),
        embedding("embeddings.position_embeddings", TOKENS, _POSITIONS, width),
        elementwise("add", TOKENS * width, inputs=2),
        layer_norm("embeddings.LayerNorm", TOKENS, width),
        elementwise("dropout", TOKENS * width),
        *blocks,
        linear("pooler.dense", 1, width, width),  # of the first token only
        elementwise("tanh", width),
        elementwise("loss", width),
    )


def _block(name: str, width: int, heads: int) -> tuple[Layer, ...]:
    """Post-norm: each half ends with dropout, residual sum and layer norm."""
    return (
        *(linear(f"{name}.attention.self.{part}", TOKENS, width, width) for part in ("query", "key", "value")),
        attention("attention", TOKENS, width, heads),
        linear(f"{name}.attention.output.dense", TOKENS, width, width),
        *_finish(f"{name}.attention.output.LayerNorm", width),
        linear(f"{name}.intermediate.dense", TOKENS, width, 4 * width),
        elementwise("gelu", TOKENS * 4 * width),
        linear(f"{name}.output.dense", TOKENS, 4 * width, width),
        *_finish(f"{name}.output.LayerNorm", width),
    )


def _finish(norm: str, width: int) -> tuple[Layer, ...]:
    return (
        elementwise("dropout", TOKENS * width),
        elementwise("add", TOKENS * width, inputs=2),
        layer_norm(norm, TOKENS, width),
    )
