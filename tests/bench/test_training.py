import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from bench_workers import prepare_on_loopback, start_on_loopback, train_on_loopback
from penstock.bench import training, training_worker
from penstock.bench.jobs import Place
from penstock.bench.training import (
    Effort,
    compared,
    count_steps,
    parse_methods,
    parse_models,
    parse_startup,
    startup_rows,
    train_rows,
)
from penstock.bench.training_worker import Trained, TrainJob
from penstock.errors import ClusterError, PenstockError
from spawn import spawn

EFFORT = Effort(rounds=2, iterations=1, warmup=2, profile=2)
PLACE = Place(2, "1gbit")
METHODS = ("no-communication", "ddp", "ddp-adamw", "ddp-silent", "penstock-single", "penstock-bsp-split", "ddp-bf16")


@pytest.fixture(scope="module")
def trained():
    return spawn(2, train_on_loopback, METHODS)


def test_every_method_is_timed_once_per_round_and_all_ranks_agree(trained):
    (rows, finished), (others, _) = trained
    assert rows == others
    times = {row["method"]: row["seconds"] for row in rows if "seconds" in row}
    assert list(times) == list(METHODS[:6])
    assert all(len(each) == 2 and min(each) > 0 for each in times.values())
    assert finished[:7] == list(METHODS)
    assert sorted(finished[7:]) == sorted(2 * METHODS[:6])


def test_ranks_that_do_not_end_together_are_timed_from_last_start_to_last_end(monkeypatch):
    import torch

    other_rank = torch.tensor([[2.0], [9.0]], dtype=torch.float64)  # this rank: from 0 to 10
    monkeypatch.setattr(training_worker.dist, "all_reduce", lambda mine, _: mine.copy_(torch.maximum(mine, other_rank)))
    assert training_worker.iteration_seconds([0.0], [10.0], iterations=4) == [2.0]


def test_a_method_that_cannot_be_built_leaves_the_others_alone(trained):
    failed = [row for row in trained[0][0] if "error" in row]
    assert [row["method"] for row in failed] == ["ddp-bf16"]
    assert failed[0]["error"].startswith("TypeError: BF16 all reduce communication hook required CUDA")


def test_bytes_are_at_least_those_of_the_gradients(trained):
    """At least: other tests send over this loopback device meanwhile."""
    sent = {row["method"]: row["nbytes"] for row in trained[0][0] if "nbytes" in row}
    gradients = 269_722 * 4  # ResNet-20; two ranks on one loopback device each send that much
    for method in ("ddp", "penstock-single", "penstock-bsp-split"):
        assert min(sent[method]) > 1.9 * gradients


@pytest.mark.parametrize("finish", [None, lambda: None])
def test_bytes_are_shared_out_among_the_iterations_that_sent_them(monkeypatch, finish):
    counter = iter([100, 1300])
    monkeypatch.setattr(training_worker, "sent_nbytes", lambda nic: next(counter))
    monkeypatch.setattr(training_worker.dist, "barrier", lambda: None)
    steps = []
    subject = training_worker.Subject("any", Trained(None, lambda: None, finish), lambda: steps.append(1), 0.0)
    training_worker._measure(subject, TrainJob("any", 1, ("any",), 1, 3, 0, 0, 1, nic="lo"))
    assert len(steps) == (4 if finish else 3)  # one goes ahead where updates go on during the next
    assert subject.nbytes == [1200 // len(steps)]


def test_plans_are_in_force_when_timing_begins(trained):
    planned = next(row for row in trained[0][0] if row["method"] == "penstock-single")
    assert planned["messages"] == 1
    assert planned["strategies"] in ("native", "ring", "recursive_doubling")
    assert planned["predicted_seconds"] > 0


def test_codecs_for_adamw_are_in_force_when_timing_begins_and_momentum_is_exchanged():
    names = ("penstock-blocks", "penstock-compressed-adamw")
    first, second = spawn(2, prepare_on_loopback, names)
    assert first == second
    optimizers, routes, warms_up = zip(*(first[name] for name in names), strict=True)
    assert optimizers == ("SGD", "CompressedAdamW")
    assert all(route.endswith("+blocks(bits=4)") for route in routes[0])
    assert all(route.endswith("+onebit(block=256)") for route in routes[1])
    assert warms_up == (None, False)


def test_a_start_is_timed_until_the_plan_is_in_force_and_all_ranks_agree():
    first, second = spawn(2, start_on_loopback, "penstock-exact")
    assert first == second
    assert first["profiled"] == 2
    assert 0 < first["held_seconds"] < first["ready_seconds"]
    assert first["routes"] in ("native", "ring", "recursive_doubling")


def test_a_cold_start_has_empty_caches_and_the_warm_one_those_it_left(monkeypatch):
    seen = []

    def run_job(place, module, job, done, timeout_seconds, environment):
        folder = Path(environment["XDG_CACHE_HOME"])
        seen.append((job["methods"], job["startup"], folder.exists(), environment))
        folder.mkdir(parents=True, exist_ok=True)
        return [{"ready_seconds": 9.0, "held_seconds": 3.0}]

    monkeypatch.setattr(training, "run_job", run_job)
    rows = startup_rows(PLACE, "resnet20", 8, ["penstock-exact", "penstock-auto"], 5, lambda _: None)
    assert [(row["method"], row["start"]) for row in rows] == [
        (name, start) for name in ("penstock-exact", "penstock-auto") for start in ("cold", "warm")
    ]
    assert all(row["held_seconds"] == 3.0 for row in rows)
    assert [(methods, startup, warm) for methods, startup, warm, _ in seen] == [
        ((name,), True, warm) for name in ("penstock-exact", "penstock-auto") for warm in (False, True)
    ]
    assert seen[0][3] == seen[1][3] != seen[2][3]
    assert set(seen[0][3]) == {"HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"}


def test_a_start_that_fails_is_a_row_with_its_error(monkeypatch):
    def run_job(*_):
        raise ClusterError("rank 1 ended")

    monkeypatch.setattr(training, "run_job", run_job)
    rows = startup_rows(PLACE, "resnet20", 8, ["penstock-auto"], 5, lambda _: None)
    assert [row["error"] for row in rows] == ["rank 1 ended"] * 2


def result(method, *seconds):
    return {"method": method, "batch": 8, "seconds": list(seconds), "nbytes": [10], "messages": None,
            "strategies": None, "predicted_seconds": None}  # fmt: skip


def fake_run(monkeypatch, crashing=()):
    """Replace the emulated hosts: methods in `crashing` take their process group down."""
    groups = []

    def run_job(place, module, job, done, timeout_seconds, environment):
        groups.append(job["methods"])
        for name in job["methods"]:
            if name in crashing:
                raise ClusterError(f"rank 1 ended with exit code 134: {name} died")
        base = {"no-communication": 1.0, "ddp": 2.0, "ddp-5": 1.6, "penstock-exact": 1.5}
        return [result(name, base.get(name, 3.0), base.get(name, 3.0) + 0.2) for name in job["methods"]]

    monkeypatch.setattr(training, "run_job", run_job)
    return groups


MAKES_GRADIENTS = """
import resource, torch
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def iterate(): [torch.ones(1 << number) for number in range(10, 24)]
seen = []
for _ in range(25):
    before = faults()
    iterate()
    seen.append(faults() - before)
print(sorted(seen[12:])[6])  # after as many iterations as settle in the holes that others left, the median
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the variables are glibc's")
def test_ranks_keep_the_memory_of_gradients_between_iterations(monkeypatch):
    """64 MB in 14 tensors are 16,384 pages: made anew in each iteration, their faults are a tenth of its time."""
    seen = []
    monkeypatch.setattr(training, "run_job", lambda *arguments: seen.append(arguments[-1]) or [])
    train_rows(PLACE, "resnet20", 8, ["no-communication"], EFFORT, print)
    found = subprocess.run(
        [sys.executable, "-c", MAKES_GRADIENTS], env=os.environ | seen[0], capture_output=True, text=True, check=True
    )
    assert int(found.stdout) < 100


def test_rows_hold_exposed_time_and_ratios_to_stock(monkeypatch):
    fake_run(monkeypatch)
    names = ["no-communication", "ddp", "ddp-5", "penstock-exact"]
    rows = {row["method"]: row for row in train_rows(PLACE, "resnet20", 8, names, EFFORT, print)}
    assert rows["ddp"]["exposed_seconds"] == pytest.approx(1.0)
    assert rows["ddp"]["spread"] == pytest.approx(0.2)
    assert rows["penstock-exact"]["ratio_to_ddp"] == pytest.approx(1.6 / 2.1)
    assert rows["penstock-exact"]["ratio_to_best_ddp"] == pytest.approx(1.6 / 1.7)
    assert rows["ddp-5"]["ratio_to_best_ddp"] == 1
    assert (rows["ddp"]["hosts"], rows["ddp"]["rate"], rows["ddp"]["model"]) == (2, "1gbit", "resnet20")


def test_gpu_ranks_share_cores_by_rank_and_rows_say_where_they_were(monkeypatch):
    jobs = []

    def run_job(place, worker, job, *_):
        jobs.append((place.ranks, job["device"], job["threads"]))
        return [result("ddp", 1.0)]

    monkeypatch.setattr(training, "run_job", run_job)
    monkeypatch.setattr(training.os, "sched_getaffinity", lambda _: set(range(8)))
    place = Place(2, "10gbit", gpus="shared", ranks_per_host=2)
    (row,) = train_rows(place, "resnet20", 8, ["ddp"], EFFORT, print)
    assert jobs == [(4, "cuda", 2)]
    assert (row["hosts"], row["ranks_per_host"], row["gpus"]) == (2, 2, "shared")
    (row,) = train_rows(PLACE, "resnet20", 8, ["ddp"], EFFORT, print)
    assert jobs[1] == (2, "cpu", 4)
    assert not {"ranks_per_host", "gpus"} & set(row)


def test_a_risky_method_has_a_process_group_of_its_own(monkeypatch):
    groups = fake_run(monkeypatch, crashing=["ddp-powersgd"])
    rows = train_rows(PLACE, "resnet20", 8, ["no-communication", "ddp-powersgd", "ddp"], EFFORT, print)
    assert groups == [("no-communication", "ddp"), ("no-communication", "ddp-powersgd")]
    assert [row["method"] for row in rows] == ["no-communication", "ddp-powersgd", "ddp"]
    assert rows[1]["error"] == "rank 1 ended with exit code 134: ddp-powersgd died"
    assert rows[2]["iteration_seconds"] == pytest.approx(2.1)


def test_methods_run_by_themselves_when_one_takes_the_others_down(monkeypatch):
    fake_run(monkeypatch, crashing=["ddp-5"])
    rows = {row["method"]: row for row in train_rows(PLACE, "resnet20", 8, parse_methods("ddp,ddp-5"), EFFORT, print)}
    assert "died" in rows["ddp-5"]["error"]
    assert rows["ddp"]["exposed_seconds"] == pytest.approx(1.0)


def test_ratios_are_left_out_where_there_is_nothing_to_compare_with():
    (row,) = compared([{"method": "penstock-exact", "iteration_seconds": 1.0}])
    assert row["ratio_to_ddp"] is None
    assert row["ratio_to_best_ddp"] is None


def test_progress_counts_what_will_be_done():
    assert count_steps(["no-communication", "ddp", "ddp-powersgd"], rounds=3) == 2 * 4 + 2 * 4


def test_lists_on_the_command_line():
    assert parse_models("vgg16_cifar:8, resnet20") == [("vgg16_cifar", 8), ("resnet20", 0)]
    assert parse_methods("ddp,ddp,no-communication") == ["no-communication", "ddp"]
    with pytest.raises(PenstockError, match="no model of the zoo is called 'vgg'; wanted some of bert_base"):
        parse_models("vgg")
    with pytest.raises(PenstockError, match="found batch 'x' for resnet20; wanted a whole number > 0"):
        parse_models("resnet20:x")
    with pytest.raises(PenstockError, match="no training method called 'horovod'; wanted one of no-communication, ddp"):
        parse_methods("horovod")
    assert parse_startup("none") == []
    assert parse_startup("penstock-auto, penstock-exact") == ["penstock-auto", "penstock-exact"]
    with pytest.raises(PenstockError, match="--startup: ddp plans nothing; wanted methods that do"):
        parse_startup("ddp")
