from dataclasses import replace

import numpy as np
import pytest

import casync
from casync import (
    CasyncJob,
    casync_rows,
    claims,
    fastest_plan,
    least_gain,
    least_median,
    measure_job,
    simulated,
    verdict,
)
from configurations import hand_made, joint, steps
from coordinator import CoordinatorJob
from coordinator import measure_job as push
from joint import joint_rows
from penstock.bench.jobs import Place
from penstock.cluster.iteration_replay import Replay
from penstock.curves import CodecCurves, Curve
from penstock.network import LinearCost, Network
from penstock.plan import Plan, Route, cut_into_buckets
from penstock.program.composition import LANES
from penstock.runtime.communicator import Communicator
from penstock.runtime.measure_network import Measurement
from penstock.timeline import Span, Timeline
from penstock.trace import Tensor, Trace, save_trace
from penstock.traces import find_trace
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
    found = steps("ring", "onebit", 4)
    assert [each.name for each in found] == ["stock", "+ codec", "+ pipelining", "+ bulk", "+ selective"]
    assert found[1].routes == ("ring(serial=true)+onebit",)
    assert [each.lanes for each in found[1:]] == [1, LANES, LANES, LANES]
    assert [each.bulk for each in found] == [False, False, False, True, False]
    assert found[2].routes == found[3].routes == ("ring+onebit",)
    assert len({each.planner.name for each in found[1:4]}) == 1
    assert set(found[3].routes) <= set(found[4].routes)


def _measured(transport, seconds, strategies, codecs, whole_nbytes):
    lines = {route: LinearCost(1e-4, 1e-10 if "+" in route else 1e-9) for route in strategies}
    return Measurement(Network(transport.world_size, 1e-5, 1e-9, 1e-10, lines, {"onebit": ONEBIT}), {})


def test_every_step_is_replayed_for_real(tmp_path, monkeypatch):
    monkeypatch.setattr("casync.measure_network", _measured)
    path = str(tmp_path / "toy.json")
    save_trace(Trace("toy", "none", 1, "float32", 0.01, tuple(Tensor(f"t{i}", 5000, 0.002) for i in range(6))), path)
    job, finished = CasyncJob(path, "ring", ("onebit",), 1), []
    network, *rows = run_ranks(2, lambda transport: list(measure_job(transport, job, finished.append)))[0]
    assert [each["workers"] for each in network["networks"]] == [2, 2]
    assert [row["how"] for row in rows] == ["stock", "+ codec", "+ pipelining", "+ bulk", "+ selective"]
    assert [row["compressed_share"] for row in rows[:4]] == [0, 1, 1, 1]
    assert all(row["turns_seconds"] == [row["measured_seconds"]] for row in rows)
    assert all(row["measured_seconds"] >= 0.022 for row in rows)
    assert all(row["core_floor_seconds"] >= 0.012 + row["core_seconds"] for row in rows)
    assert rows[0]["wire_floor_seconds"] == pytest.approx(0.012 + 120_000 * 1e-9)  # 2 (p - 1) / p of all bytes
    assert rows[1]["wire_floor_seconds"] == pytest.approx(0.012 + 120_000 * 1e-9 / 32)
    assert len(finished) % (2 * 2) == 0
    assert 4 * 2 * 2 <= len(finished) <= 5 * 2 * 2  # configurations with the same plan are replayed once


def test_beside_joint_only_the_best_hand_made_ones_are_replayed(tmp_path, monkeypatch):
    monkeypatch.setattr("casync.measure_network", _measured)
    path = str(tmp_path / "toy.json")
    save_trace(Trace("toy", "none", 1, "float32", 0.01, tuple(Tensor(f"t{i}", 5000, 0.002) for i in range(6))), path)
    job = CasyncJob(path, "ring", ("onebit",), 1, study="joint", only=2)
    _, *rows = run_ranks(2, lambda transport: list(measure_job(transport, job, lambda _: None)))[0]
    assert len(rows) == 3
    assert rows[-1]["how"] == "joint"


def test_rows_say_what_each_step_gains(monkeypatch):
    found = [{"networks": []}, row("stock", 8.0), row("+ codec", 4.0, 0.04), row("+ bulk", 5.0, -0.1)]
    monkeypatch.setattr(casync, "run_job", lambda *_: found)
    networks = []
    rows = list(casync_rows(Place(4, "1gbit"), CasyncJob("vgg16", "ring", ("onebit",), 1), print, networks))
    assert networks == [{"hosts": 4, "rate": "1gbit", "networks": []}]
    assert [row["times_as_fast"] for row in rows] == [1, 2, 1.6]
    assert [row["times_as_fast_as_before"] for row in rows] == [1, 2, 0.8]
    found = claims(rows, "steps")
    assert [(each.value, each.wanted, each.holds) for each in found] == [
        (1.9, 1, True),
        (0.72, 1, False),
        (1, 2, False),
    ]


def steps_of(*rows):
    return [{"hosts": 4, **each} for each in rows]


def test_a_step_gains_only_what_is_more_than_the_spread_of_either():
    stock, codec = row("stock", 8.0, spread=0.0), row("+ codec", 4.0, spread=0.5)
    little, nothing = row("+ pipelining", 3.6, spread=0.1), row("+ bulk", 3.55, spread=0.04)
    found = [each for each in claims(steps_of(stock, codec, little, nothing), "steps") if "step before" in each.text]
    assert [each.holds for each in found] == [True, False, False]
    assert [verdict(*each) for each in ((stock, codec), (codec, little), (little, nothing))] == [
        "gains", "within", "within",
    ]  # fmt: skip
    assert verdict(codec, stock) == "loses"


def test_turns_show_what_a_spread_hides():
    """A slow moment makes both steps slow; turn by turn the second takes 1 to 3 ms less."""
    slow = [10.0, 10.0, 30.0, 10.0, 10.0, 10.0, 12.0]
    last, now = row("+ codec", 10.0, spread=20.0), row("+ bulk", 8.0, spread=20.0)
    gains = [2.0, 1.0, 3.0, 2.0, 1.0, 2.0, 2.0]
    last, now = (
        last | {"turns_seconds": slow},
        now | {"turns_seconds": [a - b for a, b in zip(slow, gains, strict=True)]},
    )
    assert verdict(last, now) == "gains"
    assert verdict(now, last) == "loses"
    assert least_gain(last, now) == 1.0
    assert verdict(last | {"turns_seconds": slow[:5]}, now) == "within"  # five turns are too few: the spread decides
    unsure = now | {"turns_seconds": [*slow[:5], 9.0, 11.0]}
    assert verdict(last, unsure) == "within"


@pytest.mark.parametrize("count", [6, 7, 15, 40])
def test_the_median_is_below_its_least_in_one_of_forty_at_most(count):
    """Counted over 4,000 samples of a skewed distribution whose median is 0."""
    rng = np.random.default_rng(1)
    missed = sum(least_median(list(rng.exponential(1.0, count) - np.log(2))) > 0 for _ in range(4000))
    assert missed / 4000 < 0.025 + 0.008


def test_the_same_plan_again_is_no_gain_and_a_step_measured_once_shows_none():
    bulk = row("+ bulk", 2.0, spread=0.1)
    copy = bulk | {"how": "+ selective"}
    assert verdict(bulk, copy) == "same"
    (step, _) = claims(steps_of(bulk, copy), "steps")
    assert not step.holds
    once = row("a", 2.0, spread=0.0), row("b", 1.0, spread=0.0)
    assert verdict(*once) == "once"
    assert [each.text for each in claims(steps_of(*once), "steps") if "step before" in each.text] == []


def test_simulations_are_counted_once_for_each_measurement_beside_a_null_predictor():
    computed = find_trace("vgg16").compute_seconds
    rows = [
        row("stock", 8.0),
        row("+ codec", 2.0, 0.04) | {"wire_floor_seconds": 1.96},  # both right
        row("+ bulk", 1.0, 0.01) | {"wire_floor_seconds": 0.9},  # the wire floor is 10% off
        row("+ selective", 1.0, 0.01) | {"wire_floor_seconds": 0.9},  # the same plan
        row("joint", computed, 0.2) | {"wire_floor_seconds": 0.5 * computed},  # all of it is computation
    ]
    assert simulated(rows) == (3, 2, 2)
    assert "(2 by the null predictor)" in claims(steps_of(*rows), "steps")[-1].text


def test_in_slow_motion_links_are_slower_and_times_are_divided(monkeypatch):
    places = []
    found = [{"networks": []}, row("stock", 64.0) | {"spread": 8.0}, row("+ codec", 16.0, 0.04)]
    monkeypatch.setattr(casync, "run_job", lambda place, *_: places.append(place) or found)
    networks = []
    rows = list(casync_rows(Place(4, "1gbit"), CasyncJob("vgg16", "ring", ("onebit",), 1, slower=8), print, networks))
    assert [place.rate for place in places] == ["125000000bit"]
    assert networks == [{"hosts": 4, "rate": "1gbit", "slower": 8, "networks": []}]
    assert [(row["rate"], row["slower"], row["measured_seconds"]) for row in rows] == [
        ("1gbit", 8, 8.0),
        ("1gbit", 8, 2.0),
    ]
    assert rows[0]["spread"] == 1.0
    assert rows[1]["error"] == 0.04
    assert rows[1]["times_as_fast_as_before"] == 4


def row(how, seconds, error=0.0, spread=0.4):
    share, simulated_seconds = 0.0 if how == "stock" else 1.0, seconds * (1 + error)
    told = {"measured_seconds": seconds, "spread": spread, "simulated_seconds": simulated_seconds, "error": error}
    return {"what": "vgg16", "how": how, "compressed_share": share, **told}


def test_joint_is_to_be_no_slower_than_the_best_of_its_parts():
    rows = [{"hosts": 4, **row("a", 4.0)}, {"hosts": 4, **row("b", 2.0)}, {"hosts": 4, **row("joint", 2.1)}]
    found = claims(rows, "joint")
    assert [(each.value, each.holds) for each in found] == [(1.05, False), (3, True)]


def test_of_plans_that_are_raced_the_one_that_sleeps_less_is_kept(monkeypatch):
    """Two plans of which one is made to take longer: the race tells, whatever was predicted."""
    trace = Trace("toy", "none", 1, "float32", 0.0, tuple(Tensor(f"t{i}", 50, 0.0) for i in range(4)))
    routes = [Route("ring")] * 4
    few, many = (Plan("toy", 2, "any", cut_into_buckets(trace, ends, routes[: len(ends)])) for ends in ([3], [0, 1, 3]))
    run = Replay.run

    def slower(self, *arguments, **options):
        replayed = run(self, *arguments, **options)
        more = Span("more", "network", 0.0, 100.0 + len(self._plan.buckets))
        return replace(replayed, timeline=Timeline((more,)))

    monkeypatch.setattr(Replay, "run", slower)

    def work(transport):
        return fastest_plan(trace, [many, few], Communicator(transport, timeout_seconds=60)).hash

    assert run_ranks(2, work) == [few.hash] * 2


def test_every_decider_pushes_every_gradient(tmp_path):
    path = str(tmp_path / "toy.json")
    save_trace(Trace("toy", "none", 1, "float32", 0.01, tuple(Tensor(f"t{i}", 5000, 0.002) for i in range(6))), path)
    job = CoordinatorJob(path, 1, threshold_nbytes=2000, timeout_seconds=0.002)
    rows = run_ranks(3, lambda transport: list(push(transport, job, lambda _: None)))[0]
    assert [row["how"] for row in rows] == ["at will", "bulks", "online", "steady"]
    assert all(row["messages_per_rank"] == 6 * 2 for row in rows)
    assert all(row["measured_seconds"] >= 0.022 for row in rows)
    assert all(rows[index]["batches_per_rank"] <= 12 for index in (1, 3))
