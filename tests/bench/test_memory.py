import pytest

from bench_workers import memory_on_loopback
from penstock.bench import memory
from penstock.bench.memory import claims, compared, memory_rows
from spawn import spawn


def test_a_rank_reports_what_its_model_made_it_hold():
    (first, _), (second, _) = spawn(2, memory_on_loopback, "penstock-exact-native")
    assert first == second
    weights = 269_722 * 4  # ResNet-20's, and as many bytes of gradients
    assert first[0]["peak_nbytes"] > 2 * weights
    assert first[0]["imports_nbytes"] > 50e6


def test_methods_take_turns_and_medians_are_compared_with_bucket_views(monkeypatch):
    peaks = {"ddp-views": [100, 300, 200], "penstock-exact": [204, 206, 203]}
    asked = []

    def run(_place, _worker, job, _done, _timeout):
        asked.append(job["method"])
        return [{"peak_nbytes": peaks[job["method"]][asked.count(job["method"]) - 1], "imports_nbytes": 7}]

    monkeypatch.setattr(memory, "run_job", run)
    rows = list(memory_rows([("resnet20", 4)], list(peaks), 3, print))
    assert asked == ["ddp-views", "penstock-exact"] * 3
    assert [(row["peak_nbytes"], row["spread_nbytes"]) for row in rows] == [(200, 200), (204, 3)]
    (claim,) = claims(rows)
    assert (claim.value, claim.holds) == (pytest.approx(1.02), False)


def test_without_the_peer_nothing_is_compared_or_claimed():
    rows = compared([{"method": "penstock-exact", "model": "resnet20", "peak_nbytes": 5}])
    assert rows[0]["ratio_to_views"] is None
    assert claims(rows) == []
