"""A folder of checkpoints on disk: each is there as a whole or not at all, and its digests are checked. Without torch.

    DIR/step-00000100/job.json       what was saved, in words (`penstock train`), or checkpoint.json (`Checkpoints`)
                      model.state    what is the same on all ranks
                      rank-3.state   what rank 3 alone knows
                      SHA256SUMS     the digests of all these, as `sha256sum --check` takes them

Checkpoints are written in a hidden folder, which is renamed when all is there; one that is removed is renamed before:
whatever is called a checkpoint is whole, whenever a process dies. The same step again is `step-00000100.again` until
the one before is gone, so that there is a whole one at every moment.
"""

import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from penstock.errors import FormatError, TrainError
from penstock.fields import Fields, read_json, with_an_end

MODEL, SUMS = "model.state", "SHA256SUMS"
KEPT_CHECKPOINTS = 2
Digests = dict[str, str]  # SHA-256 of files, by their names
_HIDDEN = ".step-*"  # what is not whole: being written, being removed, or left so by a process that died
_AGAIN = ".again"  # ends the name of a checkpoint that takes the place of one of the same step
_NAME = re.compile(rf"step-([0-9]{{8,}})({re.escape(_AGAIN)})?")
_SUM = re.compile(r"([0-9a-f]{64})  ([a-z0-9.-]+)")


def checkpoint_path(folder: str | os.PathLike[str], step: int) -> Path:
    """Return where the checkpoint after `step` belongs."""
    return Path(folder) / f"step-{step:08d}"


def rank_file(rank: int) -> str:
    """Return the name of the file with what one rank alone knows."""
    return f"rank-{rank}.state"


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, oldest first; one may be a link to where it lies."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (step_of(path), path.name))


def step_of(path: Path) -> int:
    """Return the step after which a checkpoint was written, by its name."""
    return int(path.name.removeprefix("step-").removesuffix(_AGAIN))


def write_digests(path: Path, head: str, digests: Mapping[str, str]) -> None:
    """Write the digests of all files of a checkpoint, its `head` among them, which is there already."""
    every = {head: _sha256(path / head), **digests}
    (path / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in every.items()))
    for name in (head, SUMS):
        with open(path / name, "rb") as file:
            os.fsync(file.fileno())


class Says(Protocol):
    """What a head must say."""

    @property
    def world_size(self) -> int:
        """How many ranks wrote the checkpoint."""


Said = TypeVar("Said", bound=Says)


@dataclass(frozen=True, slots=True)
class Head(Generic[Said]):
    """The file in which a checkpoint of one kind says what it is."""

    file: str  # its name
    format: str
    read: Callable[[Fields], Said]


@dataclass(frozen=True, slots=True)
class Found(Generic[Said]):
    """A checkpoint on disk."""

    path: Path
    said: Said  # what its head says
    digests: Digests  # of its files


def read_head(path: Path, head: Head[Said]) -> Found[Said]:
    """Return a checkpoint whose head is as its digest says; the other files are compared as they are read."""
    digests = _read_digests(path, head)
    said = read_json(path / head.file, head.format, head.read)
    ranks = range(min(said.world_size, len(digests)))  # it may say anything
    if digests.keys() != {head.file, MODEL, *map(rank_file, ranks)} or said.world_size != len(ranks):
        wanted = f"{head.file}, {MODEL} and files of {said.world_size} ranks"
        raise FormatError(str(path / SUMS), "names", sorted(digests), wanted)
    return Found(path, said, digests)


def newest_whole(folder: Path, head: Head[Said]) -> Found[Said] | None:
    """Return the newest checkpoint in `folder` whose files are all as they were written; None where there is none.

    A newer one that is damaged is named in a warning. Where all are, the error of the newest is raised.
    """
    failures: list[FormatError] = []
    for path in reversed(complete_checkpoints(folder)):
        try:
            found = read_head(path, head)
            for name, digest in found.digests.items():
                _compare(path / name, digest)
        except FormatError as error:
            failures.append(error)
            continue
        for failure in failures:
            warnings.warn(f"{failure}; going on from {path.name}, the one before", stacklevel=2)
        return found
    if failures:
        raise failures[0]
    return None


def _read_digests(path: Path, head: Head[Said]) -> Digests:
    """Return what SHA256SUMS says, once the head is as it says."""
    where = str(path / SUMS)
    try:
        text = with_an_end(path / SUMS).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "bytes that are no text"
        raise FormatError(where, "file", reason, f"the digests of a {head.format} checkpoint") from error
    lines = [_SUM.fullmatch(line) for line in text.split("\n")[:-1]]
    digests = {line[2]: line[1] for line in lines if line is not None}
    if len(digests) != len(lines) or not text.endswith("\n") or head.file not in digests:
        raise FormatError(where, "file", text, f"a line for each file, {head.file} too, as sha256sum writes it")
    _compare(path / head.file, digests[head.file])
    return digests


def _compare(path: Path, digest: str) -> None:
    try:
        found = _sha256(path)
    except OSError as error:
        raise FormatError(str(path), "file", error.strerror, "a file of a checkpoint") from error
    if found != digest:
        raise damaged(path)


def damaged(path: Path) -> FormatError:
    """Return the error of a file that differs from its digest."""
    found = f"{path.stat().st_size} bytes that are not those written"
    return FormatError(str(path), "file", found, "a whole checkpoint: name an older one")


def _sha256(path: Path) -> str:
    with open(with_an_end(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def begin(partial: Path) -> None:
    """Make the hidden folder of a checkpoint, and remove what processes that died have left."""
    for left in partial.parent.glob(_HIDDEN):
        _clear(left)
    for again in partial.parent.glob(f"step-*{_AGAIN}"):
        _replace(again)
    partial.mkdir(parents=True)


def publish(partial: Path, target: Path, world_size: int) -> None:
    """Give a checkpoint its name, now that all of it is there; old ones go, later ones stay until training is there."""
    missing = [rank for rank in range(world_size) if not (partial / rank_file(rank)).exists()]
    if missing:
        raise TrainError(f"{partial.parent}: rank {missing[0]} wrote elsewhere; wanted a folder that all workers share")
    _sync(partial)
    named = target.with_name(target.name + _AGAIN) if os.path.lexists(target) else target  # as after a resume
    partial.rename(named)
    _sync(target.parent)  # the disk has the new one before old ones go
    if named != target:
        _replace(named)
    earlier = [path for path in complete_checkpoints(target.parent) if step_of(path) <= step_of(target)]
    for old in earlier[:-KEPT_CHECKPOINTS]:
        _remove(old)


def _replace(again: Path) -> None:
    """Remove the checkpoint that `again` takes the place of, and give it that one's name."""
    target = again.with_name(again.name.removesuffix(_AGAIN))
    if os.path.lexists(target):
        _remove(target)
    again.rename(target)
    _sync(target.parent)


def what_stays(folder: Path) -> str:
    """Say which checkpoint is left after one that could not be written."""
    complete = complete_checkpoints(folder)
    return f"{complete[-1].name} is whole and stays" if complete else "there is no checkpoint before it"


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    hidden = path.with_name(f".{path.name}.removed")
    path.rename(hidden)
    _clear(hidden)


def _clear(hidden: Path) -> None:
    """Remove a hidden folder, or a link or a file in its place; what cannot go yet is left to the next `begin`."""
    if hidden.is_dir() and not hidden.is_symlink():
        shutil.rmtree(hidden, ignore_errors=True)
    else:
        with suppress(OSError):
            hidden.unlink()
