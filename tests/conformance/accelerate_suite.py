"""Accelerate's own test scripts, as tasks for a pool of ranks (`ranks.py`)."""

import importlib
import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from conformance.ranks import as_torchrun
from conformance.wrappers import wrapper_class

SCRIPTS = "accelerate.test_utils.scripts"
KEPT_FOR_GPUS = ("test_gradient_accumulation", "test_gradient_accumulation_with_opt_and_scheduler")  # by `test_sync`
NEED_TORCHDATA = ("test_stateful_dataloader", "test_stateful_dataloader_save_state")


def run(rank: int, folder: Path, name: str, flavour: str) -> None:
    """Run a script as `accelerate launch --cpu` does, or one of its functions that it keeps for GPUs."""
    os.environ |= {**as_torchrun(rank, folder), "ACCELERATE_USE_CPU": "true", "ACCELERATE_BYPASS_DEVICE_MAP": "true"}
    Accelerator.multi_device = property(lambda it: it.distributed_type == DistributedType.MULTI_CPU)  # gate of `join`
    torch.nn.parallel.DistributedDataParallel = wrapper_class(flavour)  # type: ignore[misc]  # where Accelerate takes it
    _function(name)()


def _function(name: str) -> Callable[[], Any]:
    if name in KEPT_FOR_GPUS:
        return partial(_every_way, getattr(importlib.import_module(f"{SCRIPTS}.test_sync"), name))
    script = importlib.import_module(f"{SCRIPTS}.{name}")
    for each in NEED_TORCHDATA:
        vars(script)[each] = lambda accelerator: None  # no wrapper takes part in them
    main: Callable[[], Any] = script.main
    return main


def _every_way(function: Callable[..., None]) -> None:
    """Call it with every combination of its three flags, as `test_sync` does on GPUs."""
    for flags in itertools.product([False, True], repeat=3):
        function(*flags)
