"""LSTM-PTB: gTop-k's language model, in the large configuration of Zaremba et al. (two layers of 1,500 units).

Names are those of PyTorch's word-language-model example. Each sequence starts from a state of zeros.
"""

from torch import Tensor, nn

from penstock.zoo.parts import next_word_loss, random_text
from penstock.zoo.task import RandomTask

_WORDS, _HIDDEN, _STEPS, _DROPOUT = 10000, 1500, 35, 0.65


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
    build, text = lambda: WordLSTM(_WORDS, _HIDDEN, _DROPOUT), random_text(_WORDS, _STEPS)
    return RandomTask("LSTM-PTB", 100, "a sequence of 35 words", build, text, next_word_loss)
