from pathlib import Path

import pytest

import gains
from bench_workers import delayed_replay_on_loopback
from gains import DEFAULT, Setting, claims, gain_rows, parse_settings
from penstock.cost.ways import Way
from penstock.errors import PenstockError
from penstock.network import LinearCost
from penstock.planners import find_planner
from penstock.simulator.iteration import predict
from penstock.trace import Tensor, Trace, load_trace, save_trace
from spawn import spawn

ROOT = Path(__file__).parents[2]


def replayed(how, measured, simulated):
    return {"hosts": 4, "rate": "1gbit", "what": "t/toy-cpu.json", "how": how, "measured_seconds": measured,
            "simulated_seconds": simulated, "error": simulated / measured - 1}  # fmt: skip


def rows_of(monkeypatch, *found):
    monkeypatch.setattr(gains, "replay_rows", lambda *_: list(found))
    return list(gain_rows([Setting("t/toy-cpu.json", 4, "1gbit", 0.02)], 2, print))


def test_a_gain_is_the_time_of_a_plan_over_that_of_exact(monkeypatch):
    rows = rows_of(
        monkeypatch, replayed("threshold", 1.4, 1.5), replayed("greedy", 1.1, 1.0), replayed("exact", 1.0, 1.0)
    )
    assert [row.get("measured_gain") for row in rows] == pytest.approx([1.4, 1.1, None])
    assert [row.get("predicted_gain") for row in rows] == pytest.approx([1.5, 1.0, None])
    assert {row["what"] for row in rows} == {"toy-cpu"}
    assert {row["latency_seconds"] for row in rows} == {0.02}


def test_claims_ask_for_most_of_the_predicted_gain_and_for_good_predictions(monkeypatch):
    rows = rows_of(
        monkeypatch, replayed("threshold", 1.3, 1.5), replayed("greedy", 0.9, 1.2), replayed("exact", 1.0, 1.0)
    )
    found = {claim.text.split(",")[0]: claim for claim in claims(rows)}
    assert (found["settings predicted 1.15 or more over stock"].value, found["greedy over exact"].value) == (1, 0.9)
    assert found["part of the predicted gain over stock"].value == pytest.approx(0.3 / 0.5)
    assert found["worst of three predictions off"].value == pytest.approx(1.2 / 0.9 - 1)
    assert not any(claim.holds for claim in found.values())


def test_a_setting_without_a_predicted_gain_claims_none(monkeypatch):
    rows = rows_of(
        monkeypatch, replayed("threshold", 1.0, 1.01), replayed("greedy", 1.0, 1.0), replayed("exact", 1.0, 1.0)
    )
    assert [claim.text.split(",")[0] for claim in claims(rows)] == [
        "settings predicted 1.15 or more over stock",
        "settings predicted 1.15 or more over greedy",
        "worst of three predictions off",
    ]


@pytest.mark.parametrize("text", ["resnet50:4:1gbit", "resnet50:one:1gbit:5ms", "resnet50:1:1gbit:5ms"])
def test_a_setting_that_lacks_something_is_refused(text):
    with pytest.raises(PenstockError, match="wanted TRACE:HOSTS:RATE:LATENCY"):
        parse_settings(text, "traces")


def test_each_default_setting_is_predicted_to_gain_from_rate_and_latency_alone():
    for setting in parse_settings(DEFAULT, str(ROOT / "benchmarks/traces")):
        trace = load_trace(setting.trace)
        bits = {"200mbit": 2e8, "2gbit": 2e9}[setting.rate]
        startup = 2 * setting.latency_seconds + 5e-3  # two messages follow one another on 4 hosts; 5 ms are gloo's own
        line = LinearCost(startup, 2 * (setting.hosts - 1) / setting.hosts * 8 / bits)
        times = {
            name: predict(trace, find_planner(name), [Way("native", (line,))], setting.hosts).iteration_seconds
            for name in gains.PLANNERS
        }
        assert max(times["threshold"], times["greedy"]) > gains.LEAST_GAIN * times["exact"], setting


def test_a_long_link_delays_every_message(tmp_path):
    path = str(tmp_path / "toy.json")
    save_trace(Trace("toy", "none", 1, "float32", 0.01, (Tensor("a", 10, 0.0), Tensor("b", 10, 0.0))), path)
    rows, _ = spawn(2, delayed_replay_on_loopback, path, 0.05)
    assert [row["how"] for row in rows] == ["single", "wfbp"]
    assert rows[0]["measured_seconds"] >= 0.06
    assert rows[1]["measured_seconds"] >= 0.11
