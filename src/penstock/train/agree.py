"""The few collectives by which ranks keep in step outside the gradients: losses, wishes to stop, metrics, weights."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import MismatchError
from penstock.torch.collective_errors import together

LOOK_SECONDS = 0.5  # between looks at whether a stop was requested
MOST_STEPS = 100  # between looks


def share(losses: list[Tensor], wants_to_stop: bool, seconds: float) -> tuple[list[float], bool, float]:
    """Return the losses averaged over ranks, whether any rank wants to stop, and the seconds averaged over ranks."""
    own = torch.stack([loss.detach().double().cpu() for loss in losses])
    box = torch.cat([own, torch.tensor([float(wants_to_stop), seconds], dtype=torch.float64)])
    with together("sharing losses", None):
        dist.all_reduce(box)
    *mean, stop, mean_seconds = (box / dist.get_world_size()).tolist()
    return mean, stop > 0, mean_seconds


def steps_until_look(seconds_per_step: float) -> int:
    """Return after how many steps to look again; all ranks were given the same seconds."""
    return max(1, min(MOST_STEPS, int(LOOK_SECONDS / max(seconds_per_step, 1e-6))))


def mean_metric(total: float, count: float) -> float:
    """Return the metric over all ranks' parts."""
    box = torch.tensor([total, count], dtype=torch.float64)
    with together("sharing a metric", None):
        dist.all_reduce(box)
    return float(box[0] / box[1])


def same_buffers(module: nn.Module) -> None:
    """Give all ranks rank 0's buffers, as torch's wrapper does before each forward pass: one model is evaluated."""
    with together("sharing buffers", None):
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)


def same_weights(module: nn.Module) -> str:
    """Return the digest of all parameters; raise on every rank unless all ranks hold the same bits."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    found: list[Any] = [None] * dist.get_world_size()
    with together("comparing weights", None):
        dist.all_gather_object(found, digest.hexdigest())
    if len(set(found)) > 1:
        apart = next(rank for rank, each in enumerate(found) if each != found[0])
        raise MismatchError(f"rank {apart} ended with other weights than rank 0; please report this")
    return str(found[0])
