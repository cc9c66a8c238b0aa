"""Checkpoints of a training script, which go on with any number of ranks: `saved_folder.py` says what is on disk."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from penstock.errors import FormatError, PenstockError, TrainError, one_line, shorten
from penstock.fields import Fields, write_json
from penstock.torch.collective_errors import GroupRanks
from penstock.torch.saved_folder import (
    MODEL,
    Digests,
    Head,
    begin,
    checkpoint_path,
    complete_checkpoints,
    newest_whole,
    publish,
    rank_file,
    read_head,
    step_of,
    what_stays,
    write_digests,
)
from penstock.torch.state_file import read_state, write_state

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
        if not hasattr(model, "exchange_state_dict"):
            raise TypeError(
                f"model is of type {type(model).__qualname__}; wanted the wrapper, such as penstock.torch's "
                "DistributedDataParallel, whose residuals are saved too"
            )
        self.folder, self._model, self._others, self._group = Path(folder), model, others, group

    def save(self, step: int) -> Path:
        """Write a checkpoint after `step` iterations and return its folder; every rank calls this between two.

        Where one of them cannot write, all raise `TrainError`, and the checkpoints before stay as they are.
        """
        target, ranks = checkpoint_path(self.folder, step), GroupRanks(self._group)
        own = {"exchange": self._model.exchange_state_dict()}
        common = {"model": self._model.module.state_dict(), **self._states()} if ranks.rank == 0 else {}

        def describe(path: Path, digests: Digests) -> None:
            write_json(path / HEAD.file, {"format": HEAD.format, "step": step, "world_size": ranks.world_size})
            write_digests(path, HEAD.file, digests)

        write_together(target, common, own, describe, self._group)
        return target

    def load(self, step: int | None = None) -> int:
        """Go on from the newest checkpoint and return how many iterations it has; 0, with nothing changed, without one.

        Every rank calls this before the first iteration. A newest one that is damaged is named in a warning, and the
        one before is taken; with `step`, that one and no other. What is wrong all ranks raise, and nothing has been
        loaded then: a damaged file, or the state of another model or optimizer.
        """
        rank = GroupRanks(self._group).rank
        name, *_ = gather_all(lambda: self._choose(step) if rank == 0 else "", "read", self._group)
        if not name:
            return 0
        saved, common, states = on_all(lambda: self._read(self.folder / name), "read", self._group)
        with self._others_as_before():
            on_all(lambda: self._load_others(self.folder / name, common), "read", self._group)
            self._model.load_exchange_state_dict(states)
        with fitting(self.folder / name / MODEL):
            self._model.module.load_state_dict(common["model"])  # its names, shapes and types are checked
        return saved.step

    def _load_others(self, path: Path, common: Mapping[str, Any]) -> None:
        for name, other in self._others.items():
            with fitting(path / MODEL, f"this run's {name}"):
                other.load_state_dict(common[name])
        for key, module in _with_extra_state(self._model.module).items():
            if key in common["model"]:
                with fitting(path / MODEL):
                    module.set_extra_state(deepcopy(common["model"][key]))  # it is loaded again with the model

    @contextmanager
    def _others_as_before(self) -> Iterator[None]:
        """Put back what the others and extra states were where the block raises: only loading says whether one fits."""
        before = {name: _as_now(other) for name, other in self._others.items()}
        modules = _with_extra_state(self._model.module)
        extra = {key: deepcopy(module.get_extra_state()) for key, module in modules.items()}
        try:
            yield
        except BaseException:
            for name, other in self._others.items():
                other.load_state_dict(before[name])
            for key, module in modules.items():
                module.set_extra_state(extra[key])
            raise

    def _states(self) -> dict[str, Any]:
        return {name: other.state_dict() for name, other in self._others.items()}

    def _choose(self, step: int | None) -> str:
        """Return the name of the checkpoint to go on from; "": there is none."""
        if step is None:
            found = newest_whole(self.folder, HEAD)
            return "" if found is None else found.path.name
        every = complete_checkpoints(self.folder)
        (name, *_) = [path.name for path in reversed(every) if step_of(path) == step] or [""]
        if not name:
            there = ", ".join(str(step_of(path)) for path in every) or "none"
            raise TrainError(f"a checkpoint after step {step} in {self.folder}; those there: {there}")
        return name

    def _read(self, path: Path) -> tuple["Saved", dict[str, Any], list[Mapping[str, Any]]]:
        found = read_head(path, HEAD)
        common = read_part(path / MODEL, found.digests, {"model", *self._others})
        check_model(path / MODEL, self._model.module, common["model"])
        for name, other in self._others.items():
            if isinstance(other, torch.optim.Optimizer):
                check_optimizer(path / MODEL, name, other, common[name])
        ranks = [path / rank_file(rank) for rank in range(found.said.world_size)]
        return found.said, common, [read_part(each, found.digests, {"exchange"})["exchange"] for each in ranks]


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint says about itself."""

    step: int  # iterations that were done
    world_size: int  # ranks that wrote it


def _saved(fields: Fields) -> Saved:
    fields.reject_unknown(("format", "step", "world_size"))
    return Saved(fields.integer("step", 0), fields.integer("world_size", 1))


HEAD = Head("checkpoint.json", "penstock-training/1", _saved)


# What files hold, and whether it is this run's


def read_part(
    path: Path, digests: Mapping[str, str], wanted: set[str], device: torch.device | None = None
) -> dict[str, Any]:
    """Return the values of one file of a checkpoint, tensors on `device`, the CPU without one."""
    values = read_state(path, device or torch.device("cpu"), digests[path.name])
    if values.keys() != wanted:
        raise FormatError(str(path), "parts", sorted(map(str, values)), ", ".join(sorted(wanted)))
    return values


@contextmanager
def fitting(path: Path, whose: str = "this run's model") -> Iterator[None]:
    """Raise `FormatError` where what a file of a checkpoint holds cannot be put into this run's objects."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:  # objects of the user's may raise any
        raise FormatError(str(path), "state", one_line(error), f"the state of {whose}") from error


def check_model(path: Path, module: torch.nn.Module, state: Any) -> None:
    """Raise `FormatError` unless a state has the names, shapes and types of a model's.

    torch compares names and shapes only, and those as it loads; values of another type it rounds without a word.
    """
    with fitting(path):
        own, found = _tensors(module.state_dict()), _tensors(state)
    differ = sorted((name for name in own.keys() | found.keys() if own.get(name) != found.get(name)), key=str)
    if differ:
        name = differ[0]
        more = f" ({len(differ)} differ)" if len(differ) > 1 else ""
        shown = shorten(str(name), 100).strip("'\"")
        said, wanted = (f"{shown} {each.get(name, 'is not there')}{end}" for each, end in ((found, more), (own, "")))
        raise FormatError(str(path), "model", said, f"{wanted}, as this run's model has it")


def _with_extra_state(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules that keep more than tensors (`set_extra_state`), by what a model's state calls it."""
    both = "get_extra_state", "set_extra_state"
    return {
        f"{name}._extra_state".removeprefix("."): module
        for name, module in model.named_modules()
        if all(getattr(type(module), each) is not getattr(torch.nn.Module, each) for each in both)
    }


def _as_now(other: Stateful) -> dict[str, Any]:
    """Return a state that stays as it is while another one is loaded, without a copy where torch's optimizers load.

    They put new values in the place of those before, which are twice the model's size, and write into none.
    """
    torchs = torch.optim.Optimizer
    replaces = isinstance(other, torchs) and type(other).load_state_dict is torchs.load_state_dict
    return other.state_dict() if replaces else deepcopy(other.state_dict())


def _tensors(state: Mapping[str, Any]) -> dict[str, str]:
    return {name: _tensor(value) if isinstance(value, torch.Tensor) else "no tensor" for name, value in state.items()}


def _tensor(value: torch.Tensor) -> str:
    return f"of shape {tuple(value.shape)} in {str(value.dtype).removeprefix('torch.')}"


def check_optimizer(path: Path, name: str, optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Raise `FormatError` unless a state has the groups of an optimizer: as many parameters, and options of its kinds.

    What one of torch's own keeps for a parameter must have that one's shape. torch compares the numbers of parameters
    only, and another optimizer's options and shapes fail at the first step.
    """
    with fitting(path, "this run's optimizer"):
        own, found = _groups(optimizer.state_dict()), _groups(state)
        options = _other_option(optimizer, state) if own == found else ""
        shapes = _other_shape(optimizer, state) if own == found else ""
    if own != found:
        raise FormatError(str(path), name, found, f"{own}, as this run's optimizer has it")
    if options or shapes:
        raise FormatError(str(path), name, options or shapes, "what this run's optimizer has there")


def _groups(state: Mapping[str, Any]) -> str:
    """Return the groups of an optimizer's state in words."""
    groups = [
        f"{len(group['params'])} parameters with {', '.join(sorted(group.keys() - {'params'}))}"
        for group in state["param_groups"]
    ]
    return "; ".join(groups)


def _other_option(optimizer: torch.optim.Optimizer, state: Any) -> str:
    """Return an option that is of another kind in a state than in an optimizer; "" where there is none."""
    for own, found in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for name in own.keys() - {"params"}:
            if own[name] is not None and (kind := _kind(found[name])) != (wanted := _kind(own[name])):
                return f"{name}: {kind} instead of {wanted}"
    return ""


def _kind(value: Any) -> str:
    """Return what can take the place of an optimizer's option: torch has numbers as tensors too, None for a flag."""
    if value is None or isinstance(value, bool):
        return "a flag"
    if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return "a number"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_kind, value))})"
    return f"a {type(value).__name__}"


def _other_shape(optimizer: torch.optim.Optimizer, state: Any) -> str:
    """Return what a state keeps for a parameter of another shape; "" where all fits, or any shape may be right."""
    if type(optimizer) not in _SHAPED_AS_PARAMETERS:
        return ""
    saved = [each for group in state["param_groups"] for each in group["params"]]
    own = [each for group in optimizer.param_groups for each in group["params"]]
    for key, parameter in zip(saved, own, strict=True):
        for name, value in state["state"].get(key, {}).items():
            if isinstance(value, torch.Tensor) and value.ndim and value.shape != parameter.shape:
                return f"{name} {_tensor(value)}, its parameter of {tuple(parameter.shape)}"
    return ""


_SHAPED_AS_PARAMETERS = {
    torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
    torch.optim.SparseAdam,
}  # fmt: skip


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
