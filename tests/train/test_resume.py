"""A run that was interrupted and resumed ends with the bits of one that never was."""

from pathlib import Path

import pytest

import train_jobs
from penstock.network import LinearCost, Network, save_network
from penstock.train.job import find_checkpoint
from spawn import spawn

TINY = f"{Path(__file__).parents[1] / 'train_tasks.py'}:Tiny"
WORLD = 3  # with two workers any order of a sum gives the same bits
GTOPK = [f"{way}+sparse(density=0.1)" for way in ("gtopk", "gtopk_doubling")]
METHODS = {
    "stock": {"planner": "stock"},
    "every tensor by itself": {"planner": "wfbp", "strategy": "ring"},
    "one message, native": {"planner": "single", "strategy": "native"},
    "onebit": {"planner": "single", "strategy": "ring", "codec": "onebit"},
    "terngrad, which draws": {"planner": "wfbp", "strategy": "parameter_server", "codec": "terngrad"},
    "gtopk": {"planner": "single", "codec": "gtopk", "density": 0.1, "warmup": "0.5,0.25", "warmup_every": 3},
    "gtopk as its paper trains": {
        "task": f"{TINY}Sgd",
        "planner": "single",
        "codec": "gtopk",
        "density": 0.1,
        "momentum": 0.9,
        "clip": 0.5,
        "lr_warmup": 9,
        "accumulate": 2,
    },
    "fp16 with a scaler": {
        "task": f"{TINY}Sgd",
        "planner": "single",
        "strategy": "ring",
        "codec": "onebit",
        "amp": "fp16",
        "lr_warmup": 9,
    },
}


@pytest.fixture
def network(tmp_path):
    ways = ("native", "ring", "ring+onebit", "parameter_server+terngrad", *GTOPK)
    lines = dict.fromkeys(ways, LinearCost(1e-4, 1e-9))  # all that the methods ask for: nothing is measured
    save_network(Network(WORLD, 1e-4, 1e-9, 1e-10, lines), tmp_path / "network.json")
    return str(tmp_path / "network.json")


def ends(results):
    """Return rank 0's last event of each job."""
    return [events[-1] for _, events in results[0]]


@pytest.mark.parametrize("method", METHODS)
def test_half_and_half_gives_the_bits_of_the_whole(tmp_path, network, method):
    options = {"task": TINY, "steps": 12, "seed": 5, "network": network, **METHODS[method]}
    folder = str(tmp_path / "saved")
    whole = options | {"save": folder, "save_every": 6}
    other = options | {"resume": str(tmp_path / "saved" / "step-00000006"), "evaluate_every": 1}
    unbroken, resumed, fresh = ends(spawn(WORLD, train_jobs.run_several, [whole, other, options | {"seed": 6}]))
    assert unbroken.values["weights_sha256"] == resumed.values["weights_sha256"]
    assert unbroken.values["weights_sha256"] != fresh.values["weights_sha256"]
    losses = [[step["loss"] for step in each.values["record"]["steps"]] for each in (unbroken, resumed)]
    assert losses[0] == losses[1]
    made_from = [(each.values["record"]["trace"], each.values["record"]["network"]) for each in (unbroken, resumed)]
    assert made_from[0] == made_from[1]
    assert len(losses[0]) == 12


def test_a_wish_to_stop_saves_and_can_be_resumed(tmp_path):
    options = {"task": TINY, "steps": 8, "planner": "stock", "save": str(tmp_path)}
    results = spawn(2, train_jobs.run, options, 1)
    assert [finished for finished, _ in results] == [False, False]
    saved = find_checkpoint(str(tmp_path))
    assert 0 < saved.step < 8
    assert results[0][1][-1].kind == "stopped"
    (finished, events), *_ = spawn(2, train_jobs.run, options | {"resume": str(tmp_path)})
    assert finished
    assert events[-1].step == 8


def test_other_workers_can_go_on(tmp_path):
    options = {"task": TINY, "steps": 4, "planner": "stock", "save": str(tmp_path)}
    spawn(3, train_jobs.run, options)
    (finished, events), *_ = spawn(2, train_jobs.run, options | {"resume": str(tmp_path), "steps": 6})
    assert finished
    assert [step["step"] for step in events[-1].values["record"]["steps"]] == [1, 2, 3, 4, 5, 6]


def test_only_the_newest_checkpoints_stay(tmp_path):
    spawn(1, train_jobs.run, {"task": TINY, "steps": 5, "planner": "stock", "save": str(tmp_path), "save_every": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]


def test_a_run_tells_what_it_did(tmp_path):
    (_, events), (_, others) = spawn(2, train_jobs.run, {"task": TINY, "steps": 20, "planner": "stock"})
    assert others == []
    assert [event.kind for event in events if event.kind != "steps"] == ["ready", *["evaluated"] * 11, "done"]
    record = events[-1].values["record"]
    assert record["workers"] == 2
    compute, whole = record["compute_seconds"], record["iteration_seconds"]
    assert compute + record["exposed_seconds"] == pytest.approx(max(compute, whole))
    gradients = 4 * (8 * 33 + 33 + 2 * 33 + 33 * 7 + 7 + 7 + 1)
    assert record["bytes_per_iteration"] == record["dense_bytes_per_iteration"] == gradients  # 2 (P-1)/P of them
    assert {span["rank"] for span in record["timeline"]["measured"]} == {0, 1}
    metrics = [each["metric"] for each in record["evaluations"]]
    assert metrics[-1] < metrics[0]
