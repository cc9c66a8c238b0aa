"""`make demo` in a tiny configuration: three runs, a table, a page."""

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.demo import why_not_emulated
from penstock.run_record import load_run

ROOT = Path(__file__).parents[2]
TINY = f"{ROOT / 'tests' / 'train_tasks.py'}:Tiny"


def test_the_demo_trains_three_ways_and_writes_the_page(tmp_path):
    command = ["demo", "--out", tmp_path, "--task", TINY, "--workers", 2, "--steps", 3, "--rate", ""]
    result = subprocess.run(
        [sys.executable, "-m", "penstock", *map(str, command)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "2 workers over loopback, because no rate was asked for" in result.stderr
    runs = [load_run(path) for path in tmp_path.glob("*/run.json")]
    assert {run.name for run in runs} == {"stock DDP", "exact plan", "fp8, exact plan"}
    for run in runs:
        assert run.name in result.stdout
        assert run.where == "loopback"
    assert "</html>" in (tmp_path / "report.html").read_text()


def test_a_machine_that_cannot_emulate_hosts_says_why(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "need root" in why_not_emulated(2, "1gbit")


@pytest.mark.root
def test_emulated_hosts_are_used_where_they_work():
    assert why_not_emulated(2, "1gbit") == ""


def test_make_demo_is_this_demo():
    assert "$(BIN)/penstock demo --out demo\n" in (ROOT / "Makefile").read_text()
