"""The tasks by name."""

from collections.abc import Callable
from pathlib import Path

import torch

from penstock.bench.convergence.cifar import resnet20_task, vgg16_task
from penstock.bench.convergence.tasks import Task
from penstock.bench.convergence.treebank import lstm_task
from penstock.errors import PenstockError

Make = Callable[[Path, str, torch.dtype], Task]
TASKS: dict[str, Make] = {"resnet20": resnet20_task, "vgg16": vgg16_task, "lstm": lstm_task}


def make_task(name: str, data: Path, device: str, dtype: torch.dtype) -> Task:
    """Return a task by name, its data read from below `data`; values in the network are `dtype`."""
    if name not in TASKS:
        raise PenstockError(f"no convergence task called {name!r}; wanted one of {', '.join(TASKS)}")
    return TASKS[name](data, device, dtype)
