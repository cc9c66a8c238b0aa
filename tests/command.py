"""Runs `penstock` in this process: `penstock("plan", path, "--json")`. One of its own would import it all again."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from penstock.cli.main import main


@dataclass(frozen=True)
class Outcome:
    """How a command ended, in the words of `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


def penstock(*arguments: Any) -> Outcome:
    """Run one command from `main` on, where errors become one line and an exit code."""
    stdout, stderr = io.StringIO(), io.StringIO()
    argv = ["penstock", *map(str, arguments)]
    with patch.object(sys, "argv", argv), redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            main()
        except SystemExit as ended:
            return Outcome(int(ended.code or 0), stdout.getvalue(), stderr.getvalue())
    raise AssertionError("main returned; wanted an exit code")
