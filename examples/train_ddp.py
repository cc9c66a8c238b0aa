"""Learn a circle with penstock: `torchrun --nproc-per-node 2 examples/train_ddp.py`.

`train_ddp_before.py` beside it is the same script on torch's own wrapper: one import differs.
"""

import os

import torch
import torch.distributed as dist
from penstock.torch import DistributedDataParallel as DDP

STEPS = 300

# Started without a launcher there is one worker.
for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
    os.environ.setdefault(name, value)
dist.init_process_group("gloo")
torch.manual_seed(0)  # the same weights on every rank
model = DDP(torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)))
torch.manual_seed(1 + dist.get_rank())  # and different data
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
for _ in range(STEPS):
    points = 2 * torch.rand(64, 2) - 1
    inside = (points.square().sum(1) < 0.5).float()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(points)[:, 0], inside)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if dist.get_rank() == 0:
    points = 2 * torch.rand(1000, 2) - 1
    right = ((model.module(points)[:, 0] > 0) == (points.square().sum(1) < 0.5)).float().mean()
    print("learned the circle" if right > 0.95 else f"only {100 * float(right):.0f}% right")
dist.destroy_process_group()
