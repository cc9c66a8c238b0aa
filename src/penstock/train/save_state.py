"""Checkpoints of `penstock train`, and the state of random generators.

A checkpoint is a folder per step (`torch/saved_folder.py`): `job.json` has what was trained, how far and with which
plan, `model.state` weights, buffers and optimizer, `rank-3.state` residuals and random generators. The data position is
the step.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from penstock.torch.checkpoint_folder import read_part, write_together
from penstock.torch.saved_folder import MODEL, rank_file
from penstock.train.job import Saved, write_saved

_COMMON, _OWN = {"model", "optimizer", "history"}, {"exchange", "random"}  # what parts hold


def save_checkpoint(
    saved: Saved, common: Mapping[str, Any], own: Mapping[str, Any], group: dist.ProcessGroup | None = None
) -> None:
    """Write a checkpoint to `saved.path`; all ranks call this, rank 0 with what is `common`, each with its `own`.

    Where one of them cannot write, all raise `TrainError`, and the checkpoints before stay as they are.
    """
    write_together(
        saved.path, common, own, lambda folder, digests: write_saved(replace(saved, path=folder), digests), group
    )


def load_common(saved: Saved, device: torch.device) -> dict[str, Any]:
    """Return what `save_checkpoint` was given as `common`."""
    wanted = _COMMON | ({"scaler"} if saved.job.amp == "fp16" else set())
    return read_part(saved.path / MODEL, saved.digests, wanted, device)


def load_own(saved: Saved, rank: int) -> dict[str, Any]:
    """Return what rank `rank` of the saved run gave as its own."""
    return read_part(saved.path / rank_file(rank), saved.digests, _OWN)


# The state of every random generator a training step may use, as values that `torch.load` takes without pickle.


def random_state() -> dict[str, Any]:
    """Return the state of Python's, numpy's and torch's generators."""
    kind, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(np.asarray(key, np.int64)), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Go back to `state`; raise `ValueError` for one that no generator had."""
    kind, key, position, *rest = state["numpy"]
    if not 0 <= position <= len(key):  # where numpy reads next, which it does not check itself
        raise ValueError(f"numpy's generator reads at {position} of {len(key)}")
    random.setstate(state["python"])
    np.random.set_state((kind, key.numpy().astype(np.uint32), position, *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_everything(seed: int) -> None:
    """Seed every generator."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leave all generators after the block as they were before it."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
