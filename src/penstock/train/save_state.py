"""Checkpoints: a folder per step that is there as a whole or not at all.

    DIR/step-00000100/job.json       what was trained, how far, with which plan
                      model.state    weights, buffers, optimizer (the same on all ranks)
                      rank-3.state   what rank 3 alone knows: residuals, random generators
                      SHA256SUMS     the digests of all these, as `sha256sum --check` takes them

All ranks write into a hidden folder; when the last has written, rank 0 renames it, and renames what it removes before
it does so: whatever is called a checkpoint is whole, whenever a process dies. Files that differ from their digests are
refused when they are read. The data position is the step.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from penstock.errors import FormatError, PenstockError, TrainError
from penstock.torch.collective_errors import together
from penstock.train.job import MODEL, Saved, complete_checkpoints, rank_file, write_saved
from penstock.train.state_file import read_state, write_state

KEPT_CHECKPOINTS = 2
_HIDDEN = ".step-*"  # what is not whole: being written, being removed, or left so by a process that died
_COMMON, _OWN = {"model", "optimizer", "history"}, {"exchange", "random"}  # what parts hold
Digests = dict[str, str]  # SHA-256 of files, by their names


def checkpoint_path(folder: str, step: int) -> Path:
    """Return where the checkpoint after `step` belongs."""
    return Path(folder) / f"step-{step:08d}"


def save_checkpoint(saved: Saved, common: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Write a checkpoint to `saved.path`; all ranks call this, rank 0 with what is `common`, each with its `own`.

    Where one of them cannot write, all raise `TrainError`, and the checkpoints before stay as they are.
    """
    rank, target = dist.get_rank(), saved.path
    partial = target.with_name(f".{target.name}.partial")

    def begin() -> Digests:
        _tidy(target.parent)
        partial.mkdir(parents=True)
        return {}

    def write() -> Digests:
        parts = {rank_file(rank): own} | ({MODEL: common} if rank == 0 else {})
        return {name: _write(partial / name, values) for name, values in parts.items()}

    def finish() -> Digests:
        write_saved(replace(saved, path=partial), digests)
        _publish(partial, target, saved.world_size)
        return {}

    try:
        _on_all(begin if rank == 0 else dict)
        digests = _on_all(write)
        _on_all(finish if rank == 0 else dict)
    except TrainError as error:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise TrainError(f"{error}; {_what_stays(target.parent)}") from error


def _on_all(do: Callable[[], Digests]) -> Digests:
    """Do something on each rank and return the digests of all; where it fails on one, raise on all."""
    made, failure = Digests(), ""
    try:
        made = do()
    except OSError as error:
        failure = f"{error.filename or 'the checkpoint'}: {error.strerror}; wanted a folder with room for a checkpoint"
    except PenstockError as error:
        failure = str(error)
    found: list[Any] = [None] * dist.get_world_size()
    with together("writing a checkpoint", None):
        dist.all_gather_object(found, (made, failure))
    for rank, (_, problem) in enumerate(found):
        if problem:
            raise TrainError(f"rank {rank} could not write {problem}")
    return {name: digest for digests, _ in found for name, digest in digests.items()}


def _what_stays(folder: Path) -> str:
    complete = complete_checkpoints(folder)
    return f"{complete[-1].name} is whole and stays" if complete else "there is no checkpoint before it"


def _tidy(folder: Path) -> None:
    for left in folder.glob(_HIDDEN):
        shutil.rmtree(left, ignore_errors=True)


def _write(path: Path, values: Mapping[str, Any]) -> str:
    """Write and wait until the disk has it: a rename must not overtake the data. Return the file's SHA-256."""
    try:
        return write_state(path, values)
    except OSError as error:
        error.filename = error.filename or str(path)  # which writing to an open file does not say
        raise


def _publish(partial: Path, target: Path, world_size: int) -> None:
    missing = [rank for rank in range(world_size) if not (partial / rank_file(rank)).exists()]
    if missing:
        raise TrainError(f"{partial.parent}: rank {missing[0]} wrote elsewhere; wanted a folder that all workers share")
    if target.exists():  # the same step again, as after a resume
        _remove(target)
    _sync(partial)
    partial.rename(target)
    _sync(target.parent)  # the disk has the new one before old ones go
    for old in complete_checkpoints(target.parent)[:-KEPT_CHECKPOINTS]:
        _remove(old)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    hidden = path.with_name(f".{path.name}.removed")
    path.rename(hidden)
    shutil.rmtree(hidden)


def load_common(saved: Saved, device: torch.device) -> dict[str, Any]:
    """Return what `save_checkpoint` was given as `common`."""
    return _read(saved, MODEL, _COMMON, device)


def load_own(saved: Saved, rank: int) -> dict[str, Any]:
    """Return what rank `rank` of the saved run gave as its own."""
    return _read(saved, rank_file(rank), _OWN, torch.device("cpu"))


def _read(saved: Saved, name: str, wanted: set[str], device: torch.device) -> dict[str, Any]:
    values = read_state(saved.path / name, device, saved.digests[name])
    if values.keys() != wanted:
        raise FormatError(str(saved.path / name), "file", sorted(map(str, values)), ", ".join(sorted(wanted)))
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
