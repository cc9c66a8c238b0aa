"""Checkpoints: a folder per step that is there as a whole or not at all.

    DIR/step-00000100/job.json     what was trained, how far, with which plan
                      model.pt     weights, buffers, optimizer (the same on all ranks)
                      rank-3.pt    what rank 3 alone knows: residuals, random generators

All ranks write into a hidden folder; when the last has written, rank 0 renames it, and renames what it removes before
it does so: whatever is called a checkpoint is whole, whenever a process dies. The data position is the step.
"""

import os
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from penstock.errors import FormatError, TrainError
from penstock.fields import write_json
from penstock.torch.collective_errors import together
from penstock.train.job import Saved, complete_checkpoints, saved_document

KEPT_CHECKPOINTS = 2
_HIDDEN = ".step-*"  # what is not whole: being written, being removed, or left so by a process that died


def checkpoint_path(folder: str, step: int) -> Path:
    """Return where the checkpoint after `step` belongs."""
    return Path(folder) / f"step-{step:08d}"


def save_checkpoint(saved: Saved, common: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Write a checkpoint to `saved.path`; all ranks call this, rank 0 with what is `common`, each with its `own`."""
    rank, target = dist.get_rank(), saved.path
    partial = target.with_name(f".{target.name}.partial")
    if rank == 0:
        _tidy(target.parent)
        partial.mkdir(parents=True)
    _wait_for_all()
    _write(partial / f"rank-{rank}.pt", own)
    if rank == 0:
        _write(partial / "model.pt", common)
        write_json(partial / "job.json", saved_document(saved))
    _wait_for_all()
    if rank == 0:
        _publish(partial, target, saved.world_size)
    _wait_for_all()


def _wait_for_all() -> None:
    with together("writing a checkpoint", None):
        dist.barrier()


def _tidy(folder: Path) -> None:
    for left in folder.glob(_HIDDEN):
        shutil.rmtree(left, ignore_errors=True)


def _write(path: Path, values: Mapping[str, Any]) -> None:
    """Write and wait until the disk has it: a rename must not overtake the data."""
    try:
        with open(path, "wb") as file:
            torch.save(dict(values), file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise TrainError(f"{path}: {error.strerror}; wanted a folder that every worker can write to") from error


def _publish(partial: Path, target: Path, world_size: int) -> None:
    missing = [rank for rank in range(world_size) if not (partial / f"rank-{rank}.pt").exists()]
    if missing:
        raise TrainError(f"{partial.parent}: rank {missing[0]} wrote elsewhere; wanted a folder that all workers share")
    if target.exists():  # the same step again, as after a resume
        _remove(target)
    partial.rename(target)
    for old in complete_checkpoints(target.parent)[:-KEPT_CHECKPOINTS]:
        _remove(old)


def _remove(path: Path) -> None:
    hidden = path.with_name(f".{path.name}.removed")
    path.rename(hidden)
    shutil.rmtree(hidden)


def load_common(saved: Saved, device: torch.device) -> dict[str, Any]:
    """Return what `save_checkpoint` was given as `common`."""
    return _read(saved.path / "model.pt", device)


def load_own(saved: Saved, rank: int) -> dict[str, Any]:
    """Return what rank `rank` of the saved run gave as its own."""
    return _read(saved.path / f"rank-{rank}.pt", torch.device("cpu"))


def _read(path: Path, device: torch.device) -> dict[str, Any]:
    try:
        values: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise FormatError(str(path), "file", str(error).splitlines()[0], "a file of a checkpoint") from error
    return values


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
    """Go back to `state`."""
    random.setstate(state["python"])
    kind, key, *rest = state["numpy"]
    np.random.set_state((kind, key.numpy().astype(np.uint32), *rest))
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
