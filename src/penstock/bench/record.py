"""What every benchmark's JSON says besides its rows: machine, versions, commit and command.

A figure without these cannot be repeated, so results are only written through `save_record`.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.errors import FormatError, one_line
from penstock.fields import load_json, with_an_end, write_json
from penstock.machine import describe_machine, versions

FORMAT = "penstock-bench/1"
_FIELDS = ("benchmark", "date", "command", "commit", "machine", "versions", "rows")
_PACKAGES = ("penstock", "numpy", "numba", "torch", "triton", "mpi4py", "openmpi")


def make_record(benchmark: str, rows: Sequence[dict[str, Any]], **notes: Any) -> dict[str, Any]:
    """Return the document of one benchmark run; `notes` are extra top-level fields, such as floors."""
    return {
        "format": FORMAT,
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(sys.argv),
        "commit": _commit(),
        "machine": describe_machine(),
        "versions": versions(_PACKAGES),
        **notes,
        "rows": list(rows),
    }


def save_record(record: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a record made by `make_record`."""
    write_json(path, record)


def load_record(path: Path) -> Mapping[str, Any]:
    """Return one record, checked."""
    try:
        record = load_json(with_an_end(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(str(path), "file", one_line(error), f"a {FORMAT} file") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise FormatError(str(path), "format", record.get("format") if isinstance(record, dict) else record, FORMAT)
    for name in _FIELDS:
        if name not in record:
            raise FormatError(str(path), name, "nothing", f"the field that every {FORMAT} file has")
    return record


def _command(argv: Sequence[str]) -> str:
    """Return what to type to have this again; `python -m penstock` is the `penstock` command.

    >>> _command(["src/penstock/__main__.py", "bench", "links"]), _command(["benchmarks/casync.py", "--hosts", "4"])
    ('penstock bench links', 'python benchmarks/casync.py --hosts 4')
    """
    program = Path(argv[0])
    if argv[1:2] == ["bench"]:
        return shlex.join(["penstock", *argv[1:]])
    named = program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program
    return shlex.join([*(["python", str(named)] if program.suffix == ".py" else [program.name]), *argv[1:]])


def _commit() -> str:
    """Return the commit of the source tree, marked where files differ from it; `unknown` outside a checkout."""
    tree = Path(__file__).parents[1]  # of the package
    try:
        commit = _git(tree, "rev-parse", "--short=12", "HEAD")
        changed = _git(tree, "status", "--porcelain", "--untracked-files=no", "--", ".")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit} with uncommitted changes" if changed else commit


def _git(tree: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=tree, capture_output=True, text=True, check=True).stdout.strip()
