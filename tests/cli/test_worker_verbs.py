"""`measure` and `replay` as they are started: alone, under torchrun, and on emulated hosts."""

import json
import os
import subprocess
import sys

import pytest

from penstock.network import load_network
from toy_trace import toy_trace

TRACE = toy_trace(10, 1000, 0.0005, forward_seconds=0.005)


def run(*command, **environment):
    plain = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    return subprocess.run(
        [sys.executable, "-m", *map(str, command)], capture_output=True, text=True, check=False, env=plain | environment
    )


def torchrun(*command):
    return run("torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "penstock", *command)


@pytest.mark.parametrize("verb", [("measure",), ("replay", "resnet50")])
def test_started_alone_they_say_how_to_start_them(verb):
    result = run("penstock", *verb)
    assert result.returncode == 2
    assert "started alone; wanted several workers: start it with `torchrun" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_an_unknown_engine_is_refused():
    result = run("penstock", "measure", "--engine", "smoke")
    assert result.returncode == 2
    assert "--engine: found 'smoke'; wanted one of gloo, mpi" in result.stderr


@pytest.mark.slow
def test_measure_under_torchrun_writes_a_network(tmp_path):
    result = torchrun("measure", "--seconds", 1, "--out", tmp_path / "n.json", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["workers"] == 2
    assert set(document["fit_errors"]) == {"merge", "link", "native"}
    assert load_network(tmp_path / "n.json").all_reduce["native"].b_seconds_per_byte > 0


@pytest.mark.slow
def test_replay_under_torchrun_prints_rows_and_writes_both_timelines(tmp_path):
    (tmp_path / "t.json").write_text(json.dumps(TRACE))
    arguments = ("--planner", "wfbp,exact", "--network", "gtop-k-1gbe", "--strategy", "ring", "--iterations", 2)
    result = torchrun("replay", tmp_path / "t.json", *arguments, "--perfetto", tmp_path / "p.json", "--json")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [row["planner"] for row in rows] == ["wfbp", "exact"]
    assert {"measured_seconds", "simulated_seconds", "spread", "error", "messages"} <= set(rows[0])
    events = json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"wfbp, simulated", "wfbp, measured", "exact, simulated", "exact, measured"}
