"""The shape of Hugging Face's example scripts: arguments by HfArgumentParser, a Trainer, train."""

import sys
import tempfile

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import HfArgumentParser, PrinterCallback
from penstock.integrations.transformers import Trainer, TrainingArguments

WORDS, LENGTH = 32, 16


class Text(Dataset):
    """Sequences that count upwards by one, two or three."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = (torch.arange(LENGTH + 1) * (1 + index % 3) + index) % WORDS
        return {"input_ids": words[:-1], "labels": words[1:]}


class Gpt(nn.Module):
    """A GPT of one layer that returns loss and logits, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 32), nn.Embedding(LENGTH, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of predicting each next word."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        logits = self.head(self.block(self.words(input_ids) + self.places.weight, src_mask=mask, is_causal=True))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def main(arguments: list[str]) -> None:
    """Train for 40 steps."""
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(arguments)
    torch.manual_seed(1)
    trainer = Trainer(Gpt(), args, train_dataset=Text())
    trainer.remove_callback(PrinterCallback)  # it prints every step
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    if trainer.is_world_process_zero():
        print(f"final loss {losses[-1]:.6f}", file=sys.stderr)
        print(f"{trainer.state.global_step} steps, the loss fell below a third: {losses[-1] < losses[0] / 3}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        fixed = "--max_steps 40 --logging_steps 1 --learning_rate 1e-2 --lr_scheduler_type constant --use_cpu true"
        fixed += " --per_device_train_batch_size 8 --save_strategy no --report_to none --disable_tqdm true"
        main(["--output_dir", folder, *fixed.split(), *sys.argv[1:]])
