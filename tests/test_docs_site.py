"""The documentation builds as a site, without a broken link, and its generated pages hold what they should."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the site needs the extra `docs`")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_every_verb_has_an_entry_in_the_command_line_page(site):
    page = (site / "reference" / "command-line" / "index.html").read_text()
    for verb in ("penstock plan", "penstock cluster run", "penstock bench collectives"):
        assert f">{verb}<" in page


def test_the_papers_page_has_every_paper_and_a_verdict(site):
    page = (site / "reference" / "papers" / "index.html").read_text()
    assert all(f">{paper}<" in page for paper in ("MG-WFBP", "gTop-k", "Linear pipeline", "HiPress"))
    assert "matches within" in page


def test_the_python_page_comes_from_docstrings(site):
    page = (site / "reference" / "python" / "index.html").read_text()
    assert "torch's DistributedDataParallel with planned buckets" in page.replace("&#39;", "'")
