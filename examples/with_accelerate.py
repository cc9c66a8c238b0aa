"""Accelerate with planned messages: wrap the model before `prepare`, and leave it out there. Two workers, on the CPU.

Needs `pip install penstock[examples]`.
"""

import torch
from accelerate import Accelerator, debug_launcher
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from penstock.torch import DistributedDataParallel


def train() -> None:
    """Learn the sum of eight numbers, two mini-batches per step."""
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    inputs = torch.randn(1024, 8)
    data = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer, data = accelerator.prepare(optimizer, data)  # not the model: it has its wrapper
    losses = []
    for batch, targets in data:
        with accelerator.accumulate(model):  # uses the wrapper's no_sync
            loss = nn.functional.mse_loss(model(batch), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    weights = accelerator.gather(model.module[0].weight.detach().view(1, -1))
    if accelerator.is_main_process and model.plan is not None:
        print(f"{accelerator.num_processes} workers, {len(losses)} mini-batches, a plan by {model.plan.planner}")
        print(f"the loss fell below a tenth: {losses[-1] < losses[0] / 10}")
        print(f"weights are the same everywhere: {torch.equal(weights[0], weights[1])}")


if __name__ == "__main__":
    debug_launcher(train, num_processes=2)
