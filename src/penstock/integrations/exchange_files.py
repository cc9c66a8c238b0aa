"""What ranks keep between iterations (residuals, momentum), as files in another framework's checkpoint.

    CHECKPOINT/penstock-exchange/rank-0-of-2.state
                                 rank-1-of-2.state

Each rank writes its own file: values and tensors without pickle (`torch.state_file`), and the SHA-256 of these as the
last line. When training resumes, every rank reads all of them, whatever the number of ranks is then: the folder must
be one that all ranks see, as a frameworks' own files must.
"""

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import Any

from penstock.errors import FormatError, naming_extra

with naming_extra():
    import torch
    import torch.distributed as dist

from penstock.fields import with_an_end
from penstock.torch.checkpoint_folder import on_all
from penstock.torch.collective_errors import GroupRanks
from penstock.torch.ddp import DistributedDataParallel
from penstock.torch.state_file import parse_state, write_state

FOLDER = "penstock-exchange"
_LAST_LINE = 65  # bytes: a digest and the end of the line


def wrapper_in(model: object) -> DistributedDataParallel | None:
    """Return our wrapper where `model` is one, compiled or not; None for any other model."""
    inner = getattr(model, "_orig_mod", model)  # what torch.compile calls the module that it compiled
    return inner if isinstance(inner, DistributedDataParallel) else None


def file_name(rank: int, world_size: int) -> str:
    """Return what the file of one rank is called.

    >>> file_name(0, 2)
    'rank-0-of-2.state'
    """
    return f"rank-{rank}-of-{world_size}.state"


def save_exchange(wrapper: DistributedDataParallel, checkpoint: str | Path, folder: str = FOLDER) -> None:
    """Write what each rank keeps into a folder of the checkpoint; every rank calls this between two iterations.

    Where one rank cannot write, all raise `TrainError`, and the files before stay as they are on all.
    """
    group = wrapper.process_group
    rank, world_size, place = dist.get_rank(group), dist.get_world_size(group), Path(checkpoint) / folder
    path = place / file_name(rank, world_size)
    try:
        on_all(lambda: _write_partial(path, wrapper.exchange_state_dict()), "write", group)
        on_all(lambda: _partial(path).replace(path), "write", group)
    finally:
        _remove_partial(path)
    if rank == 0:  # a checkpoint that is written again by another number of ranks
        for old in place.glob("rank-*-of-*.state"):
            if not old.name.endswith(f"-of-{world_size}.state"):
                old.unlink()


def load_exchange(wrapper: DistributedDataParallel, checkpoint: str | Path, folder: str = FOLDER) -> bool:
    """Take over from the files in a checkpoint; every rank calls this. Return False where there are none.

    A checkpoint of stock DDP has none: training goes on with nothing kept back. Where some ranks see files and
    others do not, or one is missing, all ranks raise `FormatError`; where one cannot read them, all raise `TrainError`.
    """
    states = on_all(lambda: read_exchange(Path(checkpoint) / folder), "read", wrapper.process_group)
    return take_over(wrapper, states)


def write_exchange(path: Path, state: Mapping[str, Any]) -> None:
    """Write what one rank keeps, whole or not at all."""
    try:
        _write_partial(path, state)
        _partial(path).replace(path)
    finally:
        _remove_partial(path)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _write_partial(path: Path, state: Mapping[str, Any]) -> None:
    """Write what one rank keeps beside its file, with its digest, and wait until the disk has it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = write_state(_partial(path), state)
        with open(_partial(path), "ab") as file:
            file.write(f"{digest}\n".encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise FormatError(str(path), "file", error.strerror, "a folder with room for a checkpoint") from error


def _remove_partial(path: Path) -> None:
    with suppress(OSError):  # it is there only where writing, or another rank, failed
        _partial(path).unlink()


def read_exchange(folder: Path) -> list[Mapping[str, Any]]:
    """Return what each rank kept, by the names of their files; raise `FormatError` for a file that was changed."""
    return [_read(path) for path in sorted(folder.glob("rank-*-of-*.state"))]


def _read(path: Path) -> Mapping[str, Any]:
    """Return the values of one file, whose tensors are read from the disk as they are used."""
    try:
        with open(with_an_end(path), "rb") as file:
            data = mmap(file.fileno(), 0, access=ACCESS_COPY)
    except (OSError, ValueError) as error:  # ValueError: nothing is in it
        found = error.strerror if isinstance(error, OSError) else "nothing"
        raise FormatError(str(path), "file", found, "the exchange state of a rank") from error
    with memoryview(data) as whole:
        digest = hashlib.sha256(whole[: max(0, len(data) - _LAST_LINE)]).hexdigest()
    if data[-_LAST_LINE:] != f"{digest}\n".encode():
        raise FormatError(
            str(path), "file", f"{len(data)} bytes that are not those written", "a whole one: name an older checkpoint"
        )
    return parse_state(data, str(path), torch.device("cpu"), shares=True)


def take_over(wrapper: DistributedDataParallel, states: list[Mapping[str, Any]]) -> bool:
    """Load the states of all ranks, unless no rank found any; every rank calls this."""
    counts = GroupRanks(wrapper.process_group).gather(len(states), "loading exchange states")
    if any(counts):
        wrapper.load_exchange_state_dict(states)
    return any(counts)
