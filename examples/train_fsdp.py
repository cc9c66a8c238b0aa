"""Learn a circle with weights in shards: `torchrun --nproc-per-node 4 examples/train_fsdp.py`, two hosts of two ranks.

Each pair of ranks has one copy of the weights, half of them on each; gradients are averaged between the pairs in four
bits a value.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from penstock.torch import fully_shard_with

STEPS = 300

# Started without a launcher there is one worker.
for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
    os.environ.setdefault(name, value)
dist.init_process_group("gloo")
hosts = 2 if dist.get_world_size() > 1 else 1
mesh = init_device_mesh("cpu", (hosts, dist.get_world_size() // hosts), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)  # the same weights on every rank
model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
fully_shard_with(model, mesh, layers=torch.nn.Linear, codec="blocks(bits=4)")
torch.manual_seed(1 + dist.get_rank())  # and different data
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
for _ in range(STEPS):
    points = 2 * torch.rand(64, 2) - 1
    inside = (points.square().sum(1) < 0.5).float()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(points)[:, 0], inside)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.manual_seed(0)
points = 2 * torch.rand(1000, 2) - 1
with torch.no_grad():
    right = ((model(points)[:, 0] > 0) == (points.square().sum(1) < 0.5)).float().mean()
if dist.get_rank() == 0:
    print("learned the circle" if right > 0.95 else f"only {100 * float(right):.0f}% right")
dist.destroy_process_group()
