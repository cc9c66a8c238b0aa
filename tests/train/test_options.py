"""What `penstock train` is told of an update reaches the job, and from there the weights: each option makes others."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import train_jobs
from penstock.cli.main import app
from penstock.errors import PenstockError
from penstock.network import LinearCost, Network, save_network
from spawn import spawn

TINY = f"{Path(__file__).parents[1] / 'train_tasks.py'}:TinySgd"
DENSE = {"strategy": "ring"}
GTOPK = {"codec": "gtopk", "density": 0.1}
UPDATE = [{"momentum": 0.9}, {"clip": 0.01}, {"lr_warmup": 9}, {"accumulate": 2}, {"amp": "bf16"}]
WARMUP = [{"warmup": "0.5,0.25"}, {"warmup": "0.5,0.25", "warmup_every": 2}]


@pytest.mark.parametrize(("method", "options"), [(DENSE, UPDATE), (GTOPK, [*UPDATE, *WARMUP])], ids=["dense", "gtopk"])
def test_each_option_alone_makes_other_weights(tmp_path, method, options):
    ways = ("native", "ring", "gtopk+sparse(density=0.1)", "gtopk_doubling+sparse(density=0.1)")
    network = tmp_path / "network.json"
    save_network(Network(2, 1e-4, 1e-9, 1e-10, dict.fromkeys(ways, LinearCost(1e-4, 1e-9))), network)
    base = {"task": TINY, "steps": 6, "seed": 3, "planner": "single", "network": str(network), **method}
    results = spawn(2, train_jobs.run_several, [base, base, *(base | each for each in options)])
    once, again, *others = [events[-1].values["weights_sha256"] for _, events in results[0]]
    assert once == again
    assert len({once, *others}) == 1 + len(options)


def test_options_of_the_command_line_reach_the_job(monkeypatch):
    started = []

    def run_job(job, *_):
        started.append(job)
        raise PenstockError("as far as this test goes")

    monkeypatch.setattr("penstock.train.start_workers.run_job", run_job)
    wanted = {
        "codec": "gtopk", "density": 0.1, "warmup": "0.5,0.25", "warmup_every": 3, "dense_below": 10, "momentum": 0.9,
        "clip": 0.5, "lr_warmup": 9, "accumulate": 2, "amp": "bf16",
    }  # fmt: skip
    words = [word for name, value in wanted.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    result = CliRunner().invoke(app, ["train", "--task", TINY, *words])
    assert str(result.exception) == "as far as this test goes"
    assert {name: getattr(started[0], name) for name in wanted} == wanted
