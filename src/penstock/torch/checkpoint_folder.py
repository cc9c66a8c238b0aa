"""Checkpoints of a training script, which go on with any number of ranks: `saved_folder.py` says what is on disk."""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from penstock.errors import FormatError, PenstockError, TrainError
from penstock.fields import Fields, read_json, write_json
from penstock.torch.collective_errors import GroupRanks
from penstock.torch.saved_folder import (
    MODEL,
    Digests,
    begin,
    checkpoint_path,
    complete_checkpoints,
    publish,
    rank_file,
    read_digests,
    what_stays,
    write_digests,
)
from penstock.torch.state_file import read_state, write_state

FORMAT = "penstock-training/1"
HEAD = "checkpoint.json"
Made = TypeVar("Made")


class Stateful(Protocol):
    """What a checkpoint may hold: an optimizer, a scheduler, a gradient scaler, anything that has these two."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state, the same on all ranks."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Go on from a state."""


class Wrapper(Protocol):
    """What is asked of a wrapped model: `DistributedDataParallel`, `BulkSynchronous`."""

    module: torch.nn.Module

    def exchange_state_dict(self) -> dict[str, Any]:
        """Return what this rank has not sent yet of each gradient."""

    def load_exchange_state_dict(self, states: list[Mapping[str, Any]]) -> None:
        """Take over from the states of all ranks of an earlier run."""


class Checkpoints:
    """Saves a training run, and goes on from the newest checkpoint, with as many ranks as there are then.

        checkpoints = Checkpoints("runs/a", model, optimizer=optimizer)
        for step in range(checkpoints.load(), 1000):
            ...
            checkpoints.save(step + 1)

    Weights, buffers and what `others` holds are rank 0's; residuals are every rank's own, and are shared out again
    where the number of ranks has changed, so that their sum stays. All ranks must see the folder. Files have no pickle
    in them and are compared with their digests; the two newest checkpoints are kept.

    Args:
        folder: Where checkpoints are written, one folder each; it must be one that all ranks see.
        model: The wrapped model.
        group: The ranks of the wrapper, where they are not all; None: all ranks.
        **others: What else belongs to a run, by name: anything with `state_dict` and `load_state_dict`, such as
            `optimizer=optimizer`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: Wrapper,
        group: dist.ProcessGroup | None = None,
        **others: Stateful,
    ) -> None:
        self.folder, self._model, self._others, self._group = Path(folder), model, others, group

    def save(self, step: int) -> Path:
        """Write a checkpoint after `step` iterations and return its folder; every rank calls this between two.

        Where one of them cannot write, all raise `TrainError`, and the checkpoints before stay as they are.
        """
        target, ranks = checkpoint_path(self.folder, step), GroupRanks(self._group)
        own = {"exchange": self._model.exchange_state_dict()}
        common = {"model": self._model.module.state_dict(), **self._states()} if ranks.rank == 0 else {}

        def describe(path: Path, digests: Digests) -> None:
            write_json(path / HEAD, {"format": FORMAT, "step": step, "world_size": ranks.world_size})
            write_digests(path, HEAD, digests)

        write_together(target, common, own, describe, self._group)
        return target

    def load(self) -> int:
        """Go on from the newest checkpoint and return how many iterations it has; 0, with nothing changed, without one.

        Every rank calls this before the first iteration. What is wrong with a file all ranks raise.
        """
        newest = complete_checkpoints(self.folder)[-1:]
        name = GroupRanks(self._group).from_first(newest[0].name if newest else "", "finding a checkpoint")
        if not name:
            return 0
        saved, common, states = on_all(lambda: self._read(self.folder / name), "read", self._group)
        self._model.load_exchange_state_dict(states)
        self._model.module.load_state_dict(common["model"])
        for each, other in self._others.items():
            other.load_state_dict(common[each])
        return saved.step

    def _states(self) -> dict[str, Any]:
        return {name: other.state_dict() for name, other in self._others.items()}

    def _read(self, path: Path) -> tuple["Saved", dict[str, Any], list[Mapping[str, Any]]]:
        digests = read_digests(path, HEAD, FORMAT)
        saved = read_json(path / HEAD, FORMAT, _saved)
        if digests.keys() != {HEAD, MODEL, *map(rank_file, range(min(saved.world_size, len(digests))))}:
            raise FormatError(str(path), "files", sorted(digests), f"{HEAD}, {MODEL} and one of each of "
                              f"{saved.world_size} ranks")  # fmt: skip
        common = _parts(path / MODEL, digests, {"model", *self._others})
        ranks = [path / rank_file(rank) for rank in range(saved.world_size)]
        return saved, common, [_parts(each, digests, {"exchange"})["exchange"] for each in ranks]


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint says about itself."""

    step: int  # iterations that were done
    world_size: int  # ranks that wrote it


def _saved(fields: Fields) -> Saved:
    fields.reject_unknown(("format", "step", "world_size"))
    return Saved(fields.integer("step", 0), fields.integer("world_size", 1))


def _parts(path: Path, digests: Digests, wanted: set[str]) -> dict[str, Any]:
    values = read_state(path, torch.device("cpu"), digests[path.name])
    if values.keys() != wanted:
        raise FormatError(str(path), "parts", sorted(map(str, values)), ", ".join(sorted(wanted)))
    return values


# All ranks together


def write_together(
    target: Path,
    common: Mapping[str, Any],
    own: Mapping[str, Any],
    describe: Callable[[Path, Digests], None],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint; all ranks call this, rank 0 with what is `common`, each with its `own`.

    `describe` writes the head and the digests into the folder that it is given, on rank 0. Where one rank cannot write,
    all raise `TrainError`, and the checkpoints before stay as they are.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    partial = target.with_name(f".{target.name}.partial")

    def write() -> Digests:
        parts = {rank_file(rank): own} | ({MODEL: common} if rank == 0 else {})
        return {name: _write(partial / name, values) for name, values in parts.items()}

    def finish() -> None:
        describe(partial, {name: digest for each in digests for name, digest in each.items()})
        publish(partial, target, world_size)

    try:
        on_all(lambda: begin(partial) if rank == 0 else None, "write", group)
        digests = gather_all(write, "write", group)
        on_all(lambda: finish() if rank == 0 else None, "write", group)
    except TrainError as error:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise TrainError(f"{error}; {what_stays(target.parent)}") from error


def on_all(do: Callable[[], Made], verb: str, group: dist.ProcessGroup | None) -> Made:
    """Do something on each rank and return this rank's; where it fails on one, raise `TrainError` on all."""
    made: list[Made] = []
    gather_all(lambda: made.append(do()), verb, group)
    return made[0]


def gather_all(do: Callable[[], Made], verb: str, group: dist.ProcessGroup | None) -> list[Made]:
    """Do something on each rank and return what each made; where it fails on one, raise `TrainError` on all."""
    made, failure = None, ""
    try:
        made = do()
    except OSError as error:
        failure = f"{error.filename or 'the checkpoint'}: {error.strerror}; wanted a folder with room for a checkpoint"
    except PenstockError as error:
        failure = str(error)
    found = GroupRanks(group).gather((made, failure), "writing a checkpoint" if verb == "write" else "reading one")
    for rank, (_, problem) in enumerate(found):
        if problem:
            raise TrainError(f"rank {rank} could not {verb} {problem}")
    return [made for made, _ in found]


def _write(path: Path, values: Mapping[str, Any]) -> str:
    """Write and wait until the disk has it: a rename must not overtake the data. Return the file's SHA-256."""
    try:
        return write_state(path, values)
    except OSError as error:
        error.filename = error.filename or str(path)  # which writing to an open file does not say
        raise
