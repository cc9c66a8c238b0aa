"""What every benchmark's JSON says besides its rows: machine, versions, commit and command.

A figure without these cannot be repeated, so results are only written through `save_record`.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.fields import write_json
from penstock.machine import describe_machine, versions

FORMAT = "penstock-bench/1"
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
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)


def _command(argv: Sequence[str]) -> str:
    """Return what to type to have this again; scripts and `python -m penstock` are the `penstock` command too.

    >>> _command(["benchmarks/planners.py", "bench", "planners"])
    'penstock bench planners'
    """
    program = "penstock" if argv[1:2] == ["bench"] else Path(argv[0]).name
    return shlex.join([program, *argv[1:]])


def _commit() -> str:
    """Return the commit of the source tree, marked where files differ from it; `unknown` outside a checkout."""
    tree = Path(__file__).parent
    try:
        commit = _git(tree, "rev-parse", "--short=12", "HEAD")
        changed = _git(tree, "status", "--porcelain", "--untracked-files=no", "--", ".")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit} with uncommitted changes" if changed else commit


def _git(tree: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=tree, capture_output=True, text=True, check=True).stdout.strip()
