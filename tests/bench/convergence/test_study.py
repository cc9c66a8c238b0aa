"""Runs that train together, against one run and one worker at a time."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from bench.convergence.problems import line_task
from penstock.bench.convergence import study
from penstock.bench.convergence.method import Method, parse_method
from penstock.bench.convergence.study import seconds_per_step, train
from penstock.bench.convergence.summary import against_dense
from penstock.bench.convergence.training import Fleet

METHODS = "dense gtopk:0.5 topk:0.5 onebit gtopk:0.3:corrected:dense_below=3"


def fleet_of(methods, seeds=(1, 2), workers=2, steps=60):
    task = line_task(steps)
    return Fleet(task, task.recipe, [parse_method(text) for text in methods.split()], seeds, workers, "cpu")


def test_every_method_learns_and_is_judged_on_the_way():
    rows = train([fleet_of(METHODS, seeds=(1,), steps=15)], judged=3, seconds=1000, say=lambda text: None)
    assert [row["judged_at"] for row in rows] == [[5, 10, 15]] * 5
    assert all(row["final"] < 0.5 for row in rows), [(row["method"], row["final"]) for row in rows]
    assert all(row["losses"][-1] < row["losses"][0] for row in rows)


def test_a_run_that_diverges_is_kept_and_said_to():
    fleet = fleet_of("dense", steps=2)
    fleet.weights[1] = float("nan")
    rows = train([fleet], judged=1, seconds=1000, say=lambda text: None)
    assert [row["final"] is None for row in rows] == [False, True]
    (line,) = against_dense(rows)
    assert (line["seeds"], line["diverged"]) == (1, 1)


def test_fleets_side_by_side_end_as_they_do_alone():
    def quiet(text):
        pass

    both = train([fleet_of("dense", workers=2, steps=6), fleet_of("dense", workers=4, steps=6)], 2, 1000, quiet)
    alone = train([fleet_of("dense", workers=4, steps=6)], 2, 1000, quiet)
    assert [row["workers"] for row in both] == [2, 2, 4, 4]
    assert both[2:] == alone


def test_a_study_that_is_out_of_time_keeps_what_it_has():
    said = []
    rows = train([fleet_of("dense", steps=6000)], judged=6000, seconds=0.5, say=said.append)
    assert 0 < rows[0]["steps"] < rows[0]["planned_steps"] == 6000
    assert "2 workers: step 1 of 6000: " in said[0]


def test_dense_with_two_workers_is_plain_momentum_sgd_on_both_batches():
    fleet = fleet_of("topk:0.5 dense", workers=2, steps=8)
    task, number = fleet.task, 3  # the second seed of the second method
    torch.manual_seed(2)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=task.recipe.weight_decay)
    for step in range(8):
        optimizer.param_groups[0]["lr"] = float(fleet.rates[step, number])
        optimizer.zero_grad()
        inputs, labels = task.batch(fleet.chosen[1, step].flatten(), None)
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        fleet.step()
    torch.testing.assert_close(fleet.weights[number], fleet.layout.pack(model))


def test_corrected_momentum_at_full_density_is_plain_momentum():
    corrected = Method("topk", 0.999, corrected=True, dense_below=100)  # all tensors travel dense
    task = line_task(8)
    fleet = Fleet(task, task.recipe, [Method("dense"), corrected], [1], 2, "cpu")
    for _ in range(8):
        fleet.step()
    torch.testing.assert_close(fleet.weights[0], fleet.weights[1])


def test_what_was_sent_loses_its_velocity_and_the_rest_keeps_it():
    fleet = fleet_of("gtopk:0.2:corrected", seeds=(1,), steps=8)
    fleet.enter_stage(4)
    fleet.step()
    (velocity,) = fleet.corrected.values()
    assert torch.equal(velocity == 0, fleet.residuals == 0)
    assert 0 < int((velocity == 0).sum()) <= 4  # at most two of ten elements, at two workers


@pytest.mark.parametrize(("better", "worse"), [("higher", [0, 0.05, 0.1]), ("lower", [0, -0.05, -0.1])])
def test_worse_than_dense_knows_which_way_is_better(better, worse):
    same = {"task": "t", "workers": 4, "metric_name": "m", "global_batch": 8, "steps": 1, "better": better}
    rows = [same | {"method": name, "final": final} for name, final in (("dense", 0.8), ("a", 0.76), ("b", 0.72))]
    assert [line["worse_than_dense"] for line in against_dense(rows)] == pytest.approx(worse)
    assert "worse_than_dense" not in against_dense(rows[1:])[0]


def test_methods_are_compared_with_the_learning_rate_that_suits_dense_best():
    same = {"task": "t", "workers": 4, "metric_name": "m", "global_batch": 8, "steps": 1, "better": "lower"}
    rows = [same | {"method": name, "final": final} for name, final in (("dense", 4), ("dense, rate x 2", 2), ("a", 3))]
    rows = [row | {"learning_rate": rate} for row, rate in zip(rows, (1, 2, 1), strict=True)]
    lines = against_dense(rows)
    assert [line["worse_than_dense"] for line in lines] == pytest.approx([1, 0, 0.5])
    assert [line.get("worse_at_same_rate") for line in lines] == pytest.approx([0, None, -0.25])


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_scaling_the_loss_changes_no_step(clip):
    task = line_task(6)
    recipe = replace(task.recipe, clip=clip)
    ends = []
    for scale in (1.0, 64.0):
        fleet = Fleet(replace(task, loss_scale=scale), recipe, [Method("dense"), Method("onebit")], [1], 2, "cpu")
        for _ in range(6):
            fleet.step()
        ends.append(fleet.weights)
    torch.testing.assert_close(*ends)


def test_rows_are_kept_whenever_a_fleet_was_judged():
    kept = []
    rows = train([fleet_of("dense", steps=6)], 3, 1000, lambda text: None, kept.append)
    assert [each[0]["steps"] for each in kept] == [2, 4, 6]
    assert kept[-1] == rows


def test_an_average_step_has_its_share_of_every_stage(monkeypatch):
    monkeypatch.setattr(study, "_seconds_of_stage", lambda fleets, streams, stage, steps: (1, 2, 3, 4, 10)[stage])
    assert seconds_per_step([fleet_of("dense", steps=60)]) == pytest.approx((2 * (1 + 2 + 3 + 4) + 52 * 10) / 60)


def test_the_steps_of_a_stage_are_timed_and_taken():
    fleet = fleet_of("dense gtopk:0.5", steps=60)
    assert study._seconds_of_stage([fleet], [None], 4, steps=2) > 0
    assert int(fleet.now) == study._EAGER_STEPS + 4 + 2
