"""Folders of the user's own: what is kept there may be loaded again, since no other user can have written it."""

import os
import stat
from pathlib import Path

from penstock.errors import PenstockError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class FolderError(PenstockError):
    """A folder cannot be used for what only its user may write."""


def make_private(path: Path) -> Path:
    """Make `path` with mode 700 where it is not there, and return it; raise `FolderError` where others may write to it.

    An own folder that others may read, as earlier versions made it, is closed to them; one that others may write to is
    refused, since what is in it may be theirs. So is one below a folder in which another user could replace it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        _check_parents(path.parent)
        found = path.lstat()
        _check(path, found)
        if stat.S_IMODE(found.st_mode) & _OTHERS:
            path.chmod(0o700)
        if not os.access(path, os.W_OK | os.X_OK):
            raise FolderError(f"{path}: found a folder that cannot be written; wanted one that can")
    except OSError as error:
        raise FolderError(f"{path}: {error.strerror}; wanted a folder that can be made and written") from error
    return path


def _check(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISDIR(found.st_mode):
        raise FolderError(f"{path}: found a link or a file; wanted a folder of your own")
    if found.st_uid != os.geteuid():
        raise FolderError(f"{path}: found user {found.st_uid}'s folder; wanted one of user {os.geteuid()}")
    if found.st_mode & stat.S_IWOTH or _others_in_group_write(found):
        raise FolderError(f"{path}: found mode {stat.S_IMODE(found.st_mode):o}, which lets others write; remove it")


def _check_parents(path: Path) -> None:
    """Raise where another user may rename what is below `path`: by owning a folder, or by writing to one."""
    whole = path.resolve()
    for folder in (whole, *whole.parents[:-1]):  # all but the root of the file system
        found = folder.stat()
        if found.st_uid not in (0, os.geteuid()):
            raise FolderError(f"{folder}: found user {found.st_uid}'s folder; wanted one of yours or of root's")
        is_sticky = found.st_mode & stat.S_ISVTX  # as /tmp: entries are their owners'
        if not is_sticky and (found.st_mode & stat.S_IWOTH or _others_in_group_write(found)):
            raise FolderError(f"{folder}: found mode {stat.S_IMODE(found.st_mode):o}; wanted that no other may write")


def _others_in_group_write(found: os.stat_result) -> bool:
    """Whether a group may write that is not the user's own (many systems give each user one, with umask 002)."""
    return bool(found.st_mode & stat.S_IWGRP) and found.st_gid not in (0, os.getegid())
