"""A folder of checkpoints on disk: each is there as a whole or not at all, and its digests are checked. Without torch.

    DIR/step-00000100/job.json       what was saved, in words (`penstock train`), or checkpoint.json (`Checkpoints`)
                      model.state    what is the same on all ranks
                      rank-3.state   what rank 3 alone knows
                      SHA256SUMS     the digests of all these, as `sha256sum --check` takes them

Checkpoints are written in a hidden folder, which is renamed when all is there; one that is removed is renamed before:
whatever is called a checkpoint is whole, whenever a process dies.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from penstock.errors import FormatError, TrainError

MODEL, SUMS = "model.state", "SHA256SUMS"
KEPT_CHECKPOINTS = 2
Digests = dict[str, str]  # SHA-256 of files, by their names
_HIDDEN = ".step-*"  # what is not whole: being written, being removed, or left so by a process that died
_NAME = re.compile(r"step-([0-9]{8,})")
_SUM = re.compile(r"([0-9a-f]{64})  ([a-z0-9.-]+)")


def checkpoint_path(folder: str | os.PathLike[str], step: int) -> Path:
    """Return where the checkpoint after `step` belongs."""
    return Path(folder) / f"step-{step:08d}"


def rank_file(rank: int) -> str:
    """Return the name of the file with what one rank alone knows."""
    return f"rank-{rank}.state"


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def write_digests(path: Path, head: str, digests: Mapping[str, str]) -> None:
    """Write the digests of all files of a checkpoint, its `head` among them, which is there already."""
    every = {head: _sha256(path / head), **digests}
    (path / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in every.items()))
    for name in (head, SUMS):
        with open(path / name, "rb") as file:
            os.fsync(file.fileno())


def read_digests(path: Path, head: str, what: str) -> Digests:
    """Return what SHA256SUMS says, once the `head` is as it says; `what` was wanted there, in words."""
    where = str(path / SUMS)
    try:
        text, found = (path / SUMS).read_text(encoding="ascii"), _sha256(path / head)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "bytes that are no text"
        raise FormatError(where, "file", reason, f"the digests of a {what} checkpoint") from error
    lines = [_SUM.fullmatch(line) for line in text.split("\n")[:-1]]
    digests = {line[2]: line[1] for line in lines if line is not None}
    if len(digests) != len(lines) or not text.endswith("\n"):
        raise FormatError(where, "file", text, "a line for each file, as sha256sum writes it")
    if digests.get(head) != found:
        raise FormatError(
            str(path / head), "file", "bytes that are not those written", "a whole checkpoint: name an older one"
        )
    return digests


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def begin(partial: Path) -> None:
    """Make the hidden folder of a checkpoint, and remove what processes that died have left."""
    for left in partial.parent.glob(_HIDDEN):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)


def publish(partial: Path, target: Path, world_size: int) -> None:
    """Give a checkpoint its name, now that all of it is there; old ones go."""
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
    shutil.rmtree(hidden)
