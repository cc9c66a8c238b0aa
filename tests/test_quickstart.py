"""The quickstart's commands run as written, one after the other; those with a test of their own are left to it."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "quickstart.md").read_text()
ELSEWHERE = ("git ", "make demo", "torchrun ")  # a clone; tests/cli/test_demo.py; tests/examples
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
LINES = [line for language, block in BLOCKS if not language for line in block.splitlines()]
COMMANDS = [line for line in LINES if not line.startswith(ELSEWHERE)]


def test_every_line_of_the_quickstart_is_a_command_that_is_tested():
    assert len(COMMANDS) >= 4
    assert all(line.startswith("penstock ") for line in COMMANDS)


@pytest.mark.slow
def test_the_quickstart_runs_from_top_to_bottom(tmp_path):
    pytest.importorskip("sklearn", reason="the digits come with the extra `digits`")
    for line in COMMANDS:
        command = [sys.executable, "-m", *shlex.split(line)]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{line}\n{result.stderr}"
    assert (tmp_path / "runs" / "report.html").exists()
