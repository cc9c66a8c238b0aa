"""The report as data, from synthetic runs."""

import json
from dataclasses import replace

import pytest

from penstock.errors import FormatError, PenstockError, PlanError
from penstock.report.found_runs import FoundRun, baselines, find_runs
from penstock.report.run_report import (
    MOST_SPANS,
    MOST_STEPS,
    higher_is_better,
    method_rows,
    report_document,
    summary_lines,
    thinned,
)
from penstock.run_record import save_run
from penstock.timeline import Span, Timeline
from report_samples import NETWORK, sample_runs, sample_trace, save_sample_runs


@pytest.fixture
def runs(tmp_path):
    return find_runs(save_sample_runs(tmp_path))


def rows_of(*records):
    found = [FoundRun(record.name, f"{record.name}/run.json", record) for record in records]
    return method_rows(found, baselines(found, None))


def test_stock_ddp_stands_first_and_is_what_others_are_compared_with(runs):
    rows = method_rows(runs, baselines(runs, None))
    assert [row["name"] for row in rows] == ["stock DDP", "exact plan", "onebit"]
    assert [row["is_baseline"] for row in rows] == [True, False, False]
    assert rows[2]["speedup"] == 0.0441 / 0.0148
    assert rows[2]["ratio"] == pytest.approx(1 / 31)


def test_another_baseline_can_be_chosen_by_name(runs):
    rows = method_rows(runs, baselines(runs, "onebit"))
    assert rows[0]["speedup"] == 0.0148 / 0.0441
    assert rows[0]["loses"][0].startswith("slower than onebit: 2.98 times its time")


def test_an_unknown_baseline_is_refused(runs):
    with pytest.raises(PenstockError, match="no run called 'nccl'; wanted one of stock DDP, exact plan, onebit"):
        baselines(runs, "nccl")


def test_a_method_that_is_slower_worse_or_heavier_is_told_so():
    stock, exact, _ = sample_runs()
    last = exact.evaluations[-1]
    bad = replace(
        exact,
        iteration_seconds=stock.iteration_seconds * 1.5,
        evaluations=(replace(last, metric=last.metric + 0.25),),
        bytes_per_iteration=stock.bytes_per_iteration * 2,
    )
    slower, worse, heavier = rows_of(stock, bad)[1]["loses"]
    assert slower == "slower than stock DDP: 1.5 times its time"
    assert worse == "worse held-out bits per character than stock DDP by 0.25"
    assert heavier == "sends 2 times the bytes of stock DDP"


def test_differences_of_the_last_digits_are_ties():
    stock, exact, _ = sample_runs()
    last = stock.evaluations[-1]
    tied = replace(
        exact,
        iteration_seconds=stock.iteration_seconds * 1.005,
        evaluations=(replace(last, metric=last.metric * (1 + 1e-6)),),
        bytes_per_iteration=stock.bytes_per_iteration * 1.005,
    )
    assert rows_of(stock, tied)[1]["loses"] == []


def test_of_an_accuracy_less_is_worse():
    stock, exact, _ = (replace(record, metric_name="accuracy") for record in sample_runs())
    low = replace(exact, evaluations=(replace(stock.evaluations[-1], metric=stock.evaluations[-1].metric - 0.1),))
    assert rows_of(stock, low)[1]["loses"] == ["worse accuracy than stock DDP by 0.1"]
    assert higher_is_better("held-out accuracy")
    assert not higher_is_better("perplexity")


def test_a_metric_that_is_not_finite_loses():
    stock, exact, _ = sample_runs()
    lost = replace(exact, evaluations=(replace(exact.evaluations[-1], metric=None),))
    assert "no finite held-out bits per character" in rows_of(stock, lost)[1]["loses"]


def test_runs_of_different_tasks_are_not_compared():
    stock, exact, _ = sample_runs()
    rows = rows_of(stock, replace(exact, task="another"))
    assert [row["speedup"] for row in rows] == [1.0, 1.0]
    assert all(row["is_baseline"] for row in rows)
    assert summary_lines(rows) == []


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    for place in ("first", "second"):
        (tmp_path / place).mkdir()
        save_run(sample_runs()[0], tmp_path / place / "run.json")
    assert [run.name for run in find_runs(tmp_path)] == ["stock DDP (first)", "stock DDP (second)"]


def test_a_run_of_which_nothing_is_known_but_its_name_still_makes_a_report():
    bare = replace(
        sample_runs()[0], steps=(), evaluations=(), iteration_seconds=None, samples_per_second=None, trace=None,
        network=None, compute_seconds=None, measured=None, bytes_per_iteration=None,
    )  # fmt: skip
    document = report_document([FoundRun("bare", "run.json", bare)])
    assert document["plans"] == []
    assert document["what_if"] == {"models": []}
    assert document["methods"][0]["metric"] is None
    json.dumps(document, allow_nan=False)


def test_the_machine_is_described_in_words():
    run = replace(sample_runs()[0], machine={"cpu": "AMD EPYC", "cores": 2, "memory_gib": 23.5, "rack": "b"})
    told = report_document([FoundRun("x", "run.json", run)])["versions"]
    assert told.endswith("The runs: AMD EPYC, 2 cores, 23.5 GiB of memory, rack b; torch 0.0.")


def test_long_runs_are_thinned_and_keep_their_last_step():
    steps = sample_runs()[0].steps
    long = replace(sample_runs()[0], steps=tuple(replace(steps[0], step=n) for n in range(1, 12_346)))
    (run,) = report_document([FoundRun("long", "run.json", long)])["runs"]
    assert len(run["steps"]) <= MOST_STEPS + 1
    assert run["steps_every"] == 13
    assert run["steps"][-1]["step"] == 12_345


def test_thinning_keeps_short_lists_whole():
    steps = [{"step": n} for n in range(5)]
    assert thinned(steps, 1) == steps
    assert thinned([], 3) == []
    assert [step["step"] for step in thinned(steps, 3)] == [0, 3, 4]


def test_timelines_are_bounded_and_say_so():
    many = Timeline(tuple(Span("s", "send", n * 1e-6, n * 1e-6, 0) for n in range(MOST_SPANS + 5)))
    (run,) = report_document([FoundRun("many", "run.json", replace(sample_runs()[0], measured=many))])["runs"]
    assert len(run["timeline"]["measured"]) == MOST_SPANS
    assert f"the first {MOST_SPANS} of {MOST_SPANS + 5} spans" in run["timeline_about"]


def test_a_gpus_timeline_says_that_messages_are_drawn_when_they_were_queued():
    compute = Span("forward", "compute", 0.0, 0.004), Span("backward", "compute", 0.004, 0.01)
    queued = Timeline((*compute, Span("bucket 0", "network", 0.005, 0.0051)))
    on_cpu = sample_runs()[2]
    on_gpu = replace(on_cpu, device="NVIDIA H200", engine="nccl", measured=queued)
    said = [_about(record) for record in (on_gpu, replace(on_gpu, measured=None), on_cpu)]
    assert ["queued there by the host" in each for each in said] == [True, False, False]


def _about(record):
    (run,) = report_document([FoundRun(record.name, "run.json", record)])["runs"]
    return run["timeline_about"]


def test_every_tensor_stands_in_its_bucket_with_its_bytes(runs):
    exact, onebit = report_document(runs)["plans"]
    trace = sample_trace()
    assert [t["nbytes"] for t in onebit["tensors"]] == list(trace.nbytes)
    for view in (exact, onebit):
        for bucket in view["buckets"]:
            held = [t["nbytes"] for t in view["tensors"] if t["bucket"] == bucket["index"]]
            assert (len(held), sum(held)) == (bucket["tensors"], bucket["nbytes"])
    assert {t["encoded_nbytes"] for t in exact["tensors"]} == {None}
    assert onebit["tensors"][2]["encoded_nbytes"] == trace.nbytes[2] / 32


def test_a_plan_without_a_trace_shows_its_buckets_alone():
    run = sample_runs()[1]
    (view,) = report_document([FoundRun("x", "run.json", replace(run, trace=None))])["plans"]
    assert view["tensors"] == []
    assert [bucket["nbytes"] for bucket in view["buckets"]] == [bucket.nbytes for bucket in run.plan.buckets]
    assert view["about"].startswith("12 tensors, 2.467 MB of gradients")


def test_the_plan_is_told_with_the_routes_and_bytes_that_were_really_used(runs):
    view = report_document(runs)["plans"][-1]
    assert view["about"].endswith(
        "The last iteration sent 0.13 MB for 4 MB of gradients by ring+onebit, in 3 messages."
    )


def test_a_plan_that_does_not_fit_its_trace_is_refused():
    run = sample_runs()[1]
    other = replace(run.trace, tensors=run.trace.tensors[1:])
    with pytest.raises(PlanError, match="plan anew"):
        report_document([FoundRun("x", "run.json", replace(run, trace=other))])


def test_the_predicted_parts_are_those_of_the_timeline(runs):
    row = method_rows(runs, baselines(runs, None))[1]
    timeline = runs[1].record.predicted
    sending = sum(span.seconds for span in timeline.lane("network"))
    assert row["predicted"]["exposed_seconds"] == timeline.non_overlapped_seconds
    assert row["predicted"]["hidden_seconds"] == pytest.approx(sending - timeline.non_overlapped_seconds)


def test_runs_that_take_as_long_are_as_efficient_whatever_each_measured_of_its_computation(runs):
    stock, exact, *_ = (run.record for run in runs)
    noisy = [replace(stock, compute_seconds=0.55, iteration_seconds=1.0)]
    noisy += [replace(exact, compute_seconds=seconds, iteration_seconds=1.0) for seconds in (0.43, None)]
    found = [FoundRun(f"run {index}", f"{index}/run.json", record) for index, record in enumerate(noisy)]
    (model,) = report_document(found)["what_if"]["models"]
    computed = exact.trace.compute_seconds  # what the predicted curves divide by
    assert [point["efficiency"] for point in model["measured"]] == [min(1.0, computed)] * 3
    assert 0 < computed < 1


def test_what_if_starts_from_the_fitted_network(runs):
    (model,) = report_document(runs)["what_if"]["models"]
    assert model["network"]["alpha_seconds"] == NETWORK.alpha_seconds
    assert model["strategy"] == "ring"
    assert [point["name"] for point in model["measured"]] == ["stock DDP", "exact plan", "onebit"]


def test_a_run_s_codec_cost_becomes_curves_of_the_dense_bytes(runs):
    (model,) = report_document(runs)["what_if"]["models"]
    curves, cost = model["network"]["codecs"]["onebit"], runs[2].record.codec_cost
    assert curves["encode"]["seconds_per_byte"] == cost.encode.seconds_per_byte
    assert curves["decode"]["seconds_per_byte"] == cost.decode.seconds_per_byte / 32
    assert curves["decode"]["startup_seconds"] == cost.decode.startup_seconds


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(PenstockError, match=r"no run\.json below .*; wanted the folder that `penstock train --out`"):
        find_runs(tmp_path)
    with pytest.raises(PenstockError, match="is not a folder"):
        find_runs(tmp_path / "nowhere")


def test_a_broken_record_is_named(tmp_path):
    save_sample_runs(tmp_path)
    (tmp_path / "onebit" / "run.json").write_text('{"format": "penstock-run/1", ')
    with pytest.raises(FormatError, match=r"onebit/run\.json: JSON: found .*; wanted a whole penstock-run/1 document"):
        find_runs(tmp_path)
