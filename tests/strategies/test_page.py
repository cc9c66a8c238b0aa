"""What docs/strategies.md says is what comes out."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from every_call import dense_calls, sparse_calls
from mutations import duplicate, find
from penstock.cli.main import app
from penstock.program import Collective, Op
from penstock.program.builder import whole
from penstock.strategies import Options, build
from penstock.verify import require_proof, verify
from penstock.verify.summary import summarise

PAGE = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text()
ROWS = re.findall(r"^\| (\w+) \| (\w+) \| (\d+) \| ([\d.]+) \| (\d+) \| ([\d.]+) \|", PAGE, flags=re.MULTILINE)
COMMANDS = re.findall(r"^penstock (.*)$", PAGE, flags=re.MULTILINE)


def test_the_table_has_every_strategy():
    assert [row[:2] for row in ROWS] == [key for key in dense_calls() if key[1] != "native"] + list(sparse_calls())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row[:2]))
def test_a_row_of_the_table_is_what_verify_finds(row):
    operation, name, *cells = row
    for world_size, (steps, share) in zip((8, 7), (cells[:2], cells[2:]), strict=True):
        program = build(operation, name, world_size, 65536)
        summary = summarise(program, require_proof(program).steps, itemsize=1)
        assert (str(summary.steps), f"{summary.bytes_per_nic / 65536:.2f}") == (steps, share)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, shlex.split(command), catch_exceptions=False).exit_code == 0


def test_the_python_of_the_page_runs():
    code = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    strategy, by_hand = code
    result = subprocess.run([sys.executable, "-c", by_hand], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("3\n")
    found: dict[str, Any] = {}
    exec(strategy, found)
    make = found["STAR"].builders[Collective.ALL_REDUCE]
    program = whole(lambda rank: make(rank, 5, 7, Options()), 5)
    assert require_proof(program).proved


def test_the_finding_that_the_page_shows_is_what_verify_says():
    program = build("all_reduce", "ring", 3, 9)
    finding = verify(duplicate(program, 2, find(program, 2, Op.MERGE))).findings[0]
    assert f"```text\n{finding}\n```" in PAGE
