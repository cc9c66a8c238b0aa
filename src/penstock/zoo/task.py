"""A `Task`: a model, what one batch for it looks like, and the loss; enough to run real training steps.

`penstock profile` takes any function that returns one, so a user's model is described as the zoo's own are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MakeBatch = Callable[[int, torch.device], tuple[Tensor, Tensor]]
Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Task:
    """Something to train: build the model, make a batch of inputs and targets, and compare."""

    model: str  # as a person writes it
    batch: int  # samples per worker and iteration, unless the user says otherwise
    sample: str  # what one sample is, in words
    build: Callable[[], nn.Module]  # a freshly initialised module, on torch's default device
    make_batch: MakeBatch  # (batch, device) -> random inputs and targets
    loss: Loss  # (what the model returned, targets) -> a scalar
