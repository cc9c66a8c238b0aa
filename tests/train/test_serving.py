"""Ranks that only aggregate: what the others train is what they train without them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import train_jobs
from penstock.errors import TrainError
from penstock.network import LinearCost, Network, save_network
from penstock.train.job import Job
from spawn import spawn

TINY = f"{Path(__file__).parents[1] / 'train_tasks.py'}:TinySgd"
ROUTE = "parameter_server(servers=2, dedicated=true)"


def network(folder, workers, *routes):
    """Write a network with lines of these routes, so that nothing is measured."""
    path = folder / f"network-{workers}.json"
    save_network(Network(workers, 1e-4, 1e-9, 1e-10, dict.fromkeys(routes, LinearCost(1e-4, 1e-9))), path)
    return str(path)


def test_two_workers_with_two_servers_end_with_the_bits_of_two_workers(tmp_path):
    """A sum of two and zeros is the same in any order; servers have no model, and what they tell is nothing."""
    options = {"task": TINY, "steps": 6, "seed": 3, "planner": "wfbp"}
    alone = options | {"network": network(tmp_path, 2, "ring", "native"), "strategy": "ring"}
    served = options | {"network": network(tmp_path, 4, ROUTE, "native"), "servers": 2}
    wanted = spawn(2, train_jobs.run, alone)[0][1][-1]
    found = spawn(4, train_jobs.run, served)
    assert [finished for finished, _ in found] == [True] * 4
    assert [len(events) for _, events in found[2:]] == [0, 0]
    ended = found[0][1][-1]
    assert ended.values["weights_sha256"] == wanted.values["weights_sha256"]
    for one, other in zip(ended.values["record"]["steps"], wanted.values["record"]["steps"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-12)
    assert ended.values["record"]["evaluations"][-1]["metric"] == pytest.approx(
        wanted.values["record"]["evaluations"][-1]["metric"], rel=1e-6
    )
    assert {bucket["strategy"] for bucket in ended.values["record"]["plan"]["buckets"]} == {ROUTE}


def test_a_server_carries_a_codec_and_goes_on_from_a_checkpoint(tmp_path):
    route = "parameter_server(servers=1, dedicated=true)"
    known = network(tmp_path, 3, f"{route}+onebit", "native")
    options = {"task": TINY, "steps": 8, "planner": "single", "codec": "onebit", "servers": 1, "network": known}
    whole = options | {"save": str(tmp_path / "saved"), "save_every": 4}
    resumed = options | {"resume": str(tmp_path / "saved" / "step-00000004")}
    (_, unbroken), (_, again) = spawn(3, train_jobs.run_several, [whole, resumed])[0]
    assert unbroken[-1].values["weights_sha256"] == again[-1].values["weights_sha256"]
    losses = [step["loss"] for step in unbroken[-1].values["record"]["steps"]]
    assert losses == [step["loss"] for step in again[-1].values["record"]["steps"]]


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m", "penstock")
HOSTS = ("penstock", "cluster", "run", "--hosts", "3", "--", sys.executable, "-m", "penstock")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [TORCHRUN, pytest.param(HOSTS, marks=pytest.mark.root)], ids=["torchrun", "hosts"])
def test_launchers_start_servers_beside_those_that_train(tmp_path, launcher):
    route = "parameter_server(servers=1, dedicated=true)"
    options = ("--servers", "1", "--steps", "3", "--network", network(tmp_path, 3, route, "native"), "--json")
    command = [sys.executable, "-m", *launcher, "train", "--task", TINY, *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    lines = [line[line.index("{") :] for line in result.stdout.splitlines() if "{" in line]
    record = json.loads(lines[-1])["record"]
    assert record["workers"] == 2  # the third has no model
    assert {bucket["strategy"] for bucket in record["plan"]["buckets"]} == {route}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"servers": 4}, "--servers 4 of 4 workers: wanted at least one that trains"),
        ({"servers": 1, "planner": "stock"}, "--servers 1 with stock DDP: servers are a strategy"),
        ({"servers": 1, "strategy": "ring"}, "--servers 1 with --strategy ring: servers are a strategy"),
        ({"servers": 1, "engine": "mpi"}, "--servers 1 with --engine mpi: servers are reached over gloo"),
        (
            {"servers": 1, "amp": "fp16", "codec": "onebit"},
            "--servers 1 with --amp fp16 and --codec onebit: residuals of servers do not follow its scale; use",
        ),
    ],
)
def test_servers_that_cannot_work_are_refused(options, words):
    with pytest.raises(TrainError, match=words):
        Job(**options).check()
