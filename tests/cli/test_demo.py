"""`make demo` in a tiny configuration: two runs, a table, a page."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from penstock.cli.demo import CODEC, _merging, why_not_emulated
from penstock.cost.clusters import CLUSTERS
from penstock.cost.ways import way_for
from penstock.planners import PLANNERS
from penstock.run_record import load_run
from penstock.simulator.fitted import fitted_cost
from penstock.simulator.iteration import predict
from penstock.traces import load_shipped, shipped

ROOT = Path(__file__).parents[2]
TINY = f"{ROOT / 'tests' / 'train_tasks.py'}:Tiny"


@pytest.mark.slow
def test_without_emulated_hosts_the_demo_says_so_and_trains_by_what_pays_there(tmp_path):
    command = ["demo", "--out", tmp_path, "--task", TINY, "--workers", 2, "--steps", 3, "--rate", ""]
    result = subprocess.run(
        [sys.executable, "-m", "penstock", *map(str, command)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "2 workers over loopback, because no rate was asked for" in result.stderr
    runs = [load_run(path) for path in tmp_path.glob("*/run.json")]
    assert {run.name for run in runs} == {"stock DDP", "auto, exact plan"}
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


@pytest.mark.slow
@pytest.mark.root
def test_on_emulated_hosts_what_is_recommended_ends_ahead_of_stock_and_no_row_loses(tmp_path):
    command = ["demo", "--out", tmp_path, "--steps", 20, "--rate", "200mbit"]
    result = subprocess.run(
        [sys.executable, "-m", "penstock", *map(str, command)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    stock, ours = json.loads((tmp_path / "report.json").read_text())["methods"]
    assert stock["name"] == "stock DDP"
    assert ours["name"].startswith(CODEC)
    assert ours["speedup"] > 1.3
    assert ours["loses"] == stock["loses"] == []  # what the page shows in red
    assert ours["ratio"] < 0.2


def test_make_demo_is_this_demo():
    assert "$(BIN)/penstock demo --out demo\n" in (ROOT / "Makefile").read_text()


def test_the_demo_says_what_merging_gives_in_the_median_beside_its_best_setting():
    (line,) = _merging()
    assert "1.02 times as fast as stock DDP's buckets in the median of 210 simulated settings" in line
    assert "near its most, BERT-base on 64 workers" in line


@pytest.mark.slow
def test_that_median_is_what_the_simulator_gives():
    gains = []
    for network, workers in itertools.product(CLUSTERS.values(), (8, 16, 64)):
        way = way_for(network, "ring", workers, fitted_cost)
        for trace in map(load_shipped, shipped()):
            stock, exact = (predict(trace, PLANNERS[each], [way], workers) for each in ("threshold", "exact"))
            gains.append(stock.iteration_seconds / exact.iteration_seconds)
    assert (len(gains), f"{median(gains):.2f}", sum(gain > 1.05 for gain in gains)) == (210, "1.02", 63)
    assert f"{max(gains):.2f}" == "2.46"
