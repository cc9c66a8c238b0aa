"""The shape of nanoGPT's train.py: torchrun's variables, gradient accumulation by hand, a checkpoint to resume from."""

import os
import sys
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from penstock.torch import DistributedDataParallel as DDP

WORDS, LENGTH, ACCUMULATION = 32, 16, 2
out_dir = os.environ.get("OUT_DIR", "")  # the checkpoint goes here; empty: none is kept
init_from = os.environ.get("INIT_FROM", "scratch")  # or "resume"
max_iters = int(os.environ.get("MAX_ITERS", "40"))


class Gpt(nn.Module):
    """A GPT of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 32), nn.Embedding(LENGTH, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, WORDS)

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each next word."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.block(self.words(words) + self.places.weight, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def get_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences that count upwards by one, two or three."""
    rows = torch.arange(8).unsqueeze(1) + 8 * number
    text = (torch.arange(LENGTH + 1) * (1 + rows % 3) + rows) % WORDS
    return text[:, :-1], text[:, 1:]


ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group("gloo")
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(1337)
model, iter_num, checkpoint = Gpt(), 0, None
if init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"))
    model.load_state_dict(checkpoint["model"])
    iter_num = checkpoint["iter_num"]
if ddp:
    model = DDP(model, codec="blocks(bits=4)")
raw_model = model.module if ddp else model
optimizer = torch.optim.AdamW(raw_model.parameters(), lr=1e-2)
if checkpoint is not None:
    optimizer.load_state_dict(checkpoint["optimizer"])
first = last = 0.0
for step in range(iter_num, max_iters):
    for micro_step in range(ACCUMULATION):
        if ddp:
            model.require_backward_grad_sync = micro_step == ACCUMULATION - 1
        with nullcontext():
            loss = model(*get_batch((step * ACCUMULATION + micro_step) * world_size + rank)) / ACCUMULATION
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    last = loss.item() * ACCUMULATION
    first = first or last
if rank == 0:
    checkpoint = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": max_iters}
    if out_dir:
        torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))
    print(f"final loss {last:.6f}", file=sys.stderr)
    print(f"{len(checkpoint['model'])} tensors to save, the loss fell below a fifth: {last < first / 5}")
if ddp:
    destroy_process_group()
