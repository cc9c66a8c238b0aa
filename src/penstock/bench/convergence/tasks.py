"""What is trained: a model, its data on the device, and how to judge it.

Everything a step needs is on the device before training starts: the data, and for every step which examples each
worker takes. So a step has no host work, and can be captured in a CUDA graph.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from penstock.bench.convergence.networks import Parameters, Statistics

Batch = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # (numbers, noise) -> in, wanted


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a task is trained, by every method alike."""

    steps: int
    learning_rate: float  # at its highest: it rises in the first steps and then falls as half a cosine to zero
    weight_decay: float
    rising: int  # steps in which the learning rate rises
    warmup: int  # steps of each density of the warm-up
    clip: float = 0.0  # local gradient norm, over the root of the number of workers; 0: none
    momentum: float = 0.9


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained, and on what."""

    name: str
    metric: str
    better: str  # "higher" or "lower"
    model: Callable[[], nn.Module]
    examples: int  # that one pass draws from
    batch: Batch  # numbers are [run, worker, example], noise has three of [0, 1) for each
    forward: Callable[[torch.Tensor, Parameters, Statistics], torch.Tensor]  # -> logits [run, worker, place, class]
    evaluate: Callable[[nn.Module], float]
    global_batch: int
    recipe: Recipe
    loss_scale: float = 1.0  # in the backward pass, so that float16's small numbers do not vanish
