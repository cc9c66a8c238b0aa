"""LSTM-PTB: gTop-k's language model for the Penn Treebank, two layers of 1,500 units over 35 words per sample.

Names are those of PyTorch's word-language-model example: `encoder`, `rnn`, `decoder`. On a GPU cuDNN may run both
layers in one call, so that their eight gradients become ready together; here each layer is a call of its own.
"""

from architectures.layers import Layer, elementwise, embedding, linear, lstm

STEPS = 35
_WORDS, _HIDDEN, _DEPTH = 10000, 1500, 2


def lstm_ptb() -> tuple[Layer, ...]:
    """Return the layers of LSTM-PTB; input and output tables are two tensors, not tied."""
    recurrent = (
        layer
        for index in range(_DEPTH)
        for layer in (lstm("rnn", index, STEPS, _HIDDEN, _HIDDEN), elementwise("dropout", STEPS * _HIDDEN))
    )
    return (
        embedding("encoder", STEPS, _WORDS, _HIDDEN),
        elementwise("dropout", STEPS * _HIDDEN),
        *recurrent,
        linear("decoder", STEPS, _HIDDEN, _WORDS),
        elementwise("loss", STEPS * _WORDS),
    )
