"""The shape of Accelerate's nlp_example.py: an Accelerator, `prepare`, `accelerator.backward`, `save_state`."""

import sys
import tempfile

import torch
from penstock.integrations.accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WORDS, LENGTH = 32, 16


class Classifier(nn.Module):
    """Says by how much a sequence of words counts upwards."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 32), nn.Embedding(LENGTH, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return a number for each of the three answers."""
        return self.head(self.block(self.words(words) + self.places.weight).mean(dim=1))


def get_dataloader() -> DataLoader:
    """Return sequences and what they count by."""
    rows = torch.arange(512).unsqueeze(1)
    words = (torch.arange(LENGTH) * (1 + rows % 3) + rows) % WORDS
    return DataLoader(TensorDataset(words, rows.squeeze(1) % 3), batch_size=8)


def training_function(folder: str) -> None:
    """Train for two epochs and save the state."""
    accelerator = Accelerator(cpu=True, codec="blocks(bits=4)")
    torch.manual_seed(1)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, data = accelerator.prepare(model, optimizer, get_dataloader())
    losses = []
    for _ in range(2):
        for words, answers in data:
            loss = nn.functional.cross_entropy(model(words), answers)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    accelerator.save_state(folder)
    if accelerator.is_main_process:
        print(f"final loss {losses[-1]:.6f}", file=sys.stderr)
        print(f"a state was saved, the loss fell below a fifth: {losses[-1] < losses[0] / 5}")
    accelerator.end_training()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as output:
        training_function(output)
