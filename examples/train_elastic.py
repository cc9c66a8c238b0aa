"""Learn a circle with ranks that come and go: every start goes on from the newest checkpoint, if there is one.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes 1:3 --nproc-per-node 1 --max-restarts 100 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        examples/train_elastic.py --folder /shared/runs/circle
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from penstock.torch import Checkpoints
from penstock.torch import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--folder", default="", help="of checkpoints, which all ranks see; default: a new one")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--save-every", type=int, default=50, help="steps, which are lost at most when a rank dies")
options = parser.parse_args()

# Started without a launcher there is one worker.
for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
    os.environ.setdefault(name, value)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # the same weights on every rank
network = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
model = DDP(network, codec="blocks(bits=4)")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
checkpoints = Checkpoints(options.folder or tempfile.mkdtemp(), model, optimizer=optimizer)
first = checkpoints.load()  # 0 where there is none
for step in range(first, options.steps):
    data = torch.Generator().manual_seed(1000 * step + rank)  # data follow from the step, whoever computes it
    points = 2 * torch.rand(192 // world_size, 2, generator=data) - 1
    inside = (points.square().sum(1) < 0.5).float()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(points)[:, 0], inside)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if (step + 1) % options.save_every == 0:
        checkpoints.save(step + 1)
if rank == 0:
    points = 2 * torch.rand(1000, 2, generator=torch.Generator().manual_seed(1)) - 1
    right = ((network(points)[:, 0] > 0) == (points.square().sum(1) < 0.5)).float().mean()
    print("learned the circle" if right > 0.95 else f"only {100 * float(right):.0f}% right")
dist.destroy_process_group()
