"""Compiled programs kept on disk, so that a new process neither parses nor imports the parser.

The name of a file hashes everything it depends on: the program's text, its parameters, all functions and operators, and
the compiler's own files. A file that cannot be read is written again.
"""

import hashlib
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from penstock.compll.functions import FUNCTIONS
from penstock.compll.ir import Program, program_name
from penstock.compll.operators import OPERATORS
from penstock.compll.program_bytes import program_bytes, program_from_bytes
from penstock.errors import CodecError
from penstock.private_folder import private_cache


def default_cache() -> Path | None:
    """Return where compiled programs and kernels are kept, a folder that only this user may write; None: nowhere."""
    return private_cache("compll")


def load_program(path: Path, params: Mapping[str, int | float], folder: Path | None = None) -> Program:
    """Return the IR of the compressor in a file, from the cache if it is there; see `compile_file`."""
    folder = folder or default_cache()
    text = read_source(path)
    registered = [each.text for each in FUNCTIONS.values()] + [each.text for each in OPERATORS.values()]
    key = "\n".join([str(path), text, repr(sorted(params.items())), *registered, _front_end()])
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    kept = None if folder is None else folder / f"{program_name(str(path))}_{digest}.program"
    try:
        if kept is not None:
            return program_from_bytes(kept.read_bytes())
    except (OSError, ValueError):  # not there, cut short or damaged: compiling mends it
        pass
    return _compile_and_keep(path, params, kept, digest)


def read_source(path: Path) -> str:
    """Return the text of a compressor's file; raise `CodecError` where it cannot be read or is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        found = error.strerror if isinstance(error, OSError) else f"bytes that are no text ({error.reason})"
        raise CodecError(f"{path}: found {found}; wanted a .cll file") from error


def _compile_and_keep(path: Path, params: Mapping[str, int | float], kept: Path | None, digest: str) -> Program:
    from penstock.compll.frontend.source import compile_file

    program = replace(compile_file(path, params), key=digest)
    if kept is not None:
        with suppress(OSError):  # a full or read-only disk costs time, not correctness
            write_whole(kept, program_bytes(program))
    return program


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that others see all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = tempfile.NamedTemporaryFile("wb", dir=path.parent, suffix=".tmp", delete=False)  # noqa: SIM115
    try:
        with file:
            file.write(data)
        os.replace(file.name, path)
    finally:
        Path(file.name).unlink(missing_ok=True)  # half of it, where the disk is full


def _front_end() -> str:
    """Return a text that changes with any file a program's IR depends on."""
    return file_states(program_files())


def program_files() -> list[Path]:
    """Return the files of the compiler that decide a program's IR: all but those that write and run kernels."""
    here = Path(__file__).parent
    kernels = (here / "backends" / "numba", here / "backends" / "triton")
    modules = [file for file in here.rglob("*.py") if file.parent not in kernels]
    return sorted([*modules, here / "grammar.lark"])


def file_states(files: list[Path]) -> str:
    """Return the names, times and sizes of files."""
    return "".join(f"{file.name}{file.stat().st_mtime_ns}{file.stat().st_size}" for file in files)
