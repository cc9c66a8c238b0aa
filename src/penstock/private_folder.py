"""Folders of the user's own: what is kept there may be loaded again, since no other user can have written it."""

import os
import stat
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from penstock.errors import PenstockError

_SETTING = Lock()  # numba's CACHE_DIR: put back by another thread, it would mean the working directory
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class FolderError(PenstockError):
    """A folder cannot be used for what only its user may write."""


def make_private(path: Path) -> Path:
    """Make `path` with mode 700 where it is not there, and return it; raise `FolderError` where others may write to it.

    An own folder that others may read, as earlier versions made it, is closed to them. One that others may write to, by
    their group too, is refused, since what is in it may be theirs; so is one that holds a file which another user owns
    or could have written, and one below a folder in which another user could replace it.
    """
    try:
        _make(path)
        path = path.parent.resolve() / path.name  # links are followed once: they may lead elsewhere later
        _check_parents(path.parent)
        found = path.lstat()
        _check(path, found)
        is_open = bool(found.st_mode & _OTHERS)
        _check_inside(path, found.st_ino, is_open)
        if is_open:
            path.chmod(0o700)
        if not os.access(path, os.W_OK | os.X_OK):
            raise FolderError(f"{path}: found a folder that cannot be written; wanted one that can")
    except OSError as error:
        raise FolderError(f"{path}: {error.strerror}; wanted a folder that can be made and written") from error
    return path


def private_cache(name: str) -> Path | None:
    """Return this user's own folder of that name for what is made anew when it is lost; None: nothing can be kept."""
    try:
        return make_private(Path.home() / ".cache" / "penstock" / name)
    except (FolderError, RuntimeError):  # RuntimeError: there is no home
        return None


def compiled(function: Callable[..., Any]) -> Any:
    """Return a function as numba compiles it when it is called; its machine code is kept in a private folder, or not.

    numba unpickles what it has kept. By itself it would keep it beside the module or in the user's cache, also where
    others may write, and raise where neither can be written. NUMBA_CACHE_DIR, where it is set, stays in force.
    """
    import numba

    config: Any = numba.config  # a module without annotations
    kernel = numba.njit(nogil=True)(function)
    with _SETTING:
        before = config.CACHE_DIR
        folder = before or private_cache("functions")
        if folder is not None:
            config.CACHE_DIR = str(folder)  # which numba looks at now, and not when it compiles
            try:
                kernel.enable_caching()
            except RuntimeError:  # it cannot be written
                pass
            finally:
                config.CACHE_DIR = before
    return kernel


def _make(path: Path) -> None:
    """Make a folder and those above it with mode 700, whatever the user's umask lets groups do."""
    if not path.parent.exists():
        _make(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


def _check(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISDIR(found.st_mode):
        raise FolderError(f"{path}: found a link or a file; wanted a folder of your own")
    if found.st_uid != os.geteuid():
        raise FolderError(f"{path}: found user {found.st_uid}'s folder; wanted one of user {os.geteuid()}")
    if found.st_mode & _OTHERS_WRITE:
        raise FolderError(f"{path}: found mode {stat.S_IMODE(found.st_mode):o}, which lets others write; remove it")


@cache  # once in a process: a folder of mode 700 stays as it was found
def _check_inside(path: Path, _inode: int, is_open: bool) -> None:
    """Raise where a file below `path` is another user's, or others could write it while the folder was open to them."""
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            found = os.lstat(os.path.join(folder, name))
            is_written = is_open and found.st_mode & _OTHERS_WRITE and not stat.S_ISLNK(found.st_mode)
            if found.st_uid != os.geteuid() or is_written:
                whose = f"user {found.st_uid}'s, mode {stat.S_IMODE(found.st_mode):o}"
                raise FolderError(f"{path}: found {name} ({whose}), which another user may have written; remove it")


def _check_parents(path: Path) -> None:
    """Raise where another user may rename what is below `path` (without links): by owning a folder or writing to it."""
    for folder in (path, *path.parents[:-1]):  # all but the root of the file system
        found = folder.stat()
        if found.st_uid not in (0, os.geteuid()):
            raise FolderError(f"{folder}: found user {found.st_uid}'s folder; wanted one of yours or of root's")
        is_sticky = found.st_mode & stat.S_ISVTX  # as /tmp: entries are their owners'
        if not is_sticky and found.st_mode & _OTHERS_WRITE:
            raise FolderError(f"{folder}: found mode {stat.S_IMODE(found.st_mode):o}; wanted that no other may write")
