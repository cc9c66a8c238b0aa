"""Commands of the README and the site's home exist and, where they need neither root nor several machines, run."""

import re
import shlex
import subprocess
import sys
import tomllib
from itertools import product
from pathlib import Path
from statistics import median

import pytest

from command import penstock
from penstock.cost.clusters import CLUSTERS
from penstock.cost.ways import way_for
from penstock.planners import PLANNERS
from penstock.simulator.iteration import predict
from penstock.traces import load_shipped, shipped

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"\| `((?:penstock|torchrun) [^`]+)` \|", (ROOT / "docs" / "index.md").read_text())
ELSEWHERE = (
    "--hosts",
    "FILE.cll",
    "--nproc-per-node",
    "penstock profile",
    "penstock train",
    "penstock report",
    "penstock doctor",
    "penstock check",
)  # run by tests of their own


def test_the_home_page_shows_commands():
    assert len(COMMANDS) >= 8


def test_what_check_prints_is_shown_below_its_command(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (command,) = re.findall(r"^(penstock check gpt2 .*?) +#", README, flags=re.MULTILINE)
    (printed,) = re.findall(r"^```text\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    assert penstock(*shlex.split(command)[1:]).stdout.startswith(printed), "run `python benchmarks/page.py`"
    assert printed.count("\n") == 12


def test_what_merging_gains_without_a_codec_is_what_the_simulator_says():
    gains = [
        _seconds(trace, network, workers, "threshold") / _seconds(trace, network, workers, "exact")
        for trace, network, workers in product(shipped(), CLUSTERS, (4, 16, 64))
    ]
    assert (len(shipped()), len(CLUSTERS)) == (10, 7)
    assert f"{median(gains):.2f} times as fast in the median, {max(gains):.2f} times at most" in README


def _seconds(trace: str, network: str, workers: int, planner: str) -> float:
    way = way_for(CLUSTERS[network], "ring", workers)
    return predict(load_shipped(trace), PLANNERS[planner], [way], workers=workers).iteration_seconds


SECTIONS = ("One line changed", "Install", "Will it pay?", "Measured", "Where we lose")


def test_the_readme_leads_from_the_one_line_to_where_we_lose():
    titles = re.findall(r"^## (.*)", README, flags=re.MULTILINE)
    assert titles[: len(SECTIONS)] == list(SECTIONS)
    assert "held_seconds" in README.split("## Will it pay?")[0]  # the pause at the start is told beside the diff


@pytest.mark.parametrize("command", [c for c in COMMANDS if not any(word in c for word in ELSEWHERE)])
def test_a_command_of_the_home_page_runs(command, tmp_path):
    arguments = [sys.executable, "-m", *shlex.split(command)]
    result = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_verb_of_the_home_page_exists(command):
    words = shlex.split(command)
    verb = words[words.index("penstock") + 1]
    result = subprocess.run([sys.executable, "-m", "penstock", verb, "--help"], capture_output=True, check=False)
    assert result.returncode == 0


def test_make_has_the_targets_the_readme_names():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\S+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"no target {target}"


REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
LINKS = re.findall(r"\]\(([^)]+)\)", README)


def test_links_and_images_are_absolute_so_that_they_work_on_pypi():
    relative = [link for link in LINKS if not link.startswith(("https://", "#"))]
    assert relative == []
    assert all(link.startswith("https://") for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README))


def test_every_link_into_the_repository_leads_to_a_file():
    raw = REPOSITORY.replace("github.com", "raw.githubusercontent.com")
    for link in LINKS:
        for prefix in (f"{REPOSITORY}/blob/main/", f"{raw}/main/"):
            path = link.removeprefix(prefix).split("#")[0]
            if link.startswith(prefix):
                assert (ROOT / path).exists(), link


def test_the_five_papers_are_named_with_what_is_wrong_in_them():
    table = README.split("## Five papers")[1]
    for name in ("MG-WFBP", "journal version", "gTop-k", "Efficient Communications", "HiPress"):
        assert name in table
