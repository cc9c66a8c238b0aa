"""Every `penstock` command in the docs that needs no other machine runs as written."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GENERATED = ("papers.md", "command-line.md")  # docs_site/hooks.py makes them
PLANNING = ROOT / "docs" / "planning.md"


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"^```\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("penstock ")]


@pytest.mark.parametrize("command", commands(PLANNING))
def test_a_command_of_the_planning_page_runs(command, tmp_path):
    arguments = [sys.executable, "-m", *shlex.split(command)]
    result = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_python_of_the_planning_page_runs():
    code = re.findall(r"^```python\n(.*?)^```", PLANNING.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(code) == 1
    assert subprocess.run([sys.executable, "-c", code[0]], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md")), ids=lambda p: p.name
)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")) and Path(target).name not in GENERATED:
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"
