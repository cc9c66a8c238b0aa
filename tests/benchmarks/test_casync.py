import pytest

import casync
from casync import CasyncJob, casync_rows, measure_job
from configurations import hand_made, joint, steps
from coordinator import CoordinatorJob
from coordinator import measure_job as push
from joint import joint_rows
from penstock.bench.jobs import Place
from penstock.curves import CodecCurves, Curve
from penstock.network import LinearCost, Network
from penstock.program.composition import LANES
from penstock.runtime.measure_network import Measurement
from penstock.simulator.iteration import TIE
from penstock.trace import Tensor, Trace, save_trace
from runtime.threads import run_ranks

ONEBIT = CodecCurves(1 / 32, Curve(1e-10, 1e-5), Curve(1e-10, 1e-5), fixed_nbytes=57)
CURVES = {"onebit": ONEBIT, "fp16": CodecCurves(0.5, Curve(1e-10, 1e-5), Curve(1e-10, 1e-5))}


def test_there_are_twenty_hand_made_configurations():
    made = hand_made("ring", ["onebit", "fp16"])
    assert len({each.name for each in made}) == 20
    assert joint("ring", ["onebit", "fp16"]).routes == (
        "ring", "ring+onebit", "ring+fp16", "parameter_server+onebit",
    )  # fmt: skip


@pytest.mark.parametrize("trace", ["resnet50", "googlenet", "bert_base", "vgg16", "lstm_ptb"])
def test_joint_is_at_least_as_fast_as_the_best_hand_made_one(trace):
    for row in joint_rows([trace], CURVES):
        assert row["joint_over_best"] <= 1 + 1e-9
        assert row["joint_seconds"] <= row["best_dense_seconds"]


def test_each_step_adds_one_idea():
    found = steps("parameter_server", "onebit", 4)
    assert [each.name for each in found] == ["stock", "+ codec", "+ pipelining", "+ bulk", "+ selective"]
    assert found[1].routes == ("parameter_server+onebit/4",)
    assert [each.lanes for each in found[1:]] == [1, LANES, LANES, LANES]
    assert [each.bulk for each in found] == [False, False, False, True, False]
    assert len({each.routes for each in found[1:4]}) == len({each.planner.name for each in found[1:4]}) == 1
    assert set(found[1].routes) <= set(found[4].routes)


def _measured(transport, seconds, strategies, codecs, whole_nbytes):
    lines = {route: LinearCost(1e-4, 1e-10 if "+" in route else 1e-9) for route in strategies}
    return Measurement(Network(transport.world_size, 1e-5, 1e-9, 1e-10, lines, {"onebit": ONEBIT}), {})


def test_every_step_is_replayed_for_real(tmp_path, monkeypatch):
    monkeypatch.setattr("casync.measure_network", _measured)
    path = str(tmp_path / "toy.json")
    save_trace(Trace("toy", "none", 1, "float32", 0.01, tuple(Tensor(f"t{i}", 5000, 0.002) for i in range(6))), path)
    job, finished = CasyncJob(path, "ring", ("onebit",), 1), []
    rows = run_ranks(2, lambda transport: list(measure_job(transport, job, finished.append)))[0]
    assert [row["how"] for row in rows] == ["stock", "+ codec", "+ pipelining", "+ bulk", "+ selective"]
    assert [row["compressed_share"] for row in rows[:4]] == [0, 1, 1, 1]
    assert all(row["measured_seconds"] >= 0.022 for row in rows)
    assert len(finished) == 2 * 5 * 2


def test_beside_joint_only_the_best_hand_made_ones_are_replayed(tmp_path, monkeypatch):
    monkeypatch.setattr("casync.measure_network", _measured)
    path = str(tmp_path / "toy.json")
    save_trace(Trace("toy", "none", 1, "float32", 0.01, tuple(Tensor(f"t{i}", 5000, 0.002) for i in range(6))), path)
    job = CasyncJob(path, "ring", ("onebit",), 1, study="joint", only=2)
    rows = run_ranks(2, lambda transport: list(measure_job(transport, job, lambda _: None)))[0]
    assert len(rows) == 3
    assert rows[-1]["how"] == "joint"
    assert rows[-1]["simulated_seconds"] <= (1 + TIE) * min(row["simulated_seconds"] for row in rows)


def test_rows_say_what_each_step_gains(monkeypatch):
    found = [{"how": "stock", "measured_seconds": 8.0}, {"how": "+ codec", "measured_seconds": 4.0}]
    found.append({"how": "+ bulk", "measured_seconds": 2.0})
    monkeypatch.setattr(casync, "run_job", lambda *_: found)
    rows = list(casync_rows(Place(4, "1gbit"), CasyncJob("vgg16", "ring", ("onebit",), 1), print))
    assert [row["times_as_fast"] for row in rows] == [1, 2, 4]
    assert [row["times_as_fast_as_before"] for row in rows] == [1, 2, 2]


def test_every_decider_pushes_every_gradient(tmp_path):
    path = str(tmp_path / "toy.json")
    save_trace(Trace("toy", "none", 1, "float32", 0.01, tuple(Tensor(f"t{i}", 5000, 0.002) for i in range(6))), path)
    job = CoordinatorJob(path, 1, threshold_nbytes=2000, timeout_seconds=0.002)
    rows = run_ranks(3, lambda transport: list(push(transport, job, lambda _: None)))[0]
    assert [row["how"] for row in rows] == ["at will", "bulks", "online", "steady"]
    assert all(row["messages_per_rank"] == 6 * 2 for row in rows)
    assert all(row["measured_seconds"] >= 0.022 for row in rows)
    assert all(rows[index]["batches_per_rank"] <= 12 for index in (1, 3))
