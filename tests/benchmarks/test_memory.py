import pytest

import memory
from bench_workers import memory_on_loopback
from memory import claims, memory_rows
from memory_worker import find_wrapper
from penstock.errors import PenstockError
from spawn import spawn


def run_of(peak, imports):
    return {"peak_nbytes": peak, "imports_nbytes": imports}


def rows_of(monkeypatch, runs):
    asked = []

    def run(_place, _worker, job, _done, _timeout):
        asked.append(job["method"])
        return [runs[job["method"]][asked.count(job["method"]) - 1]]

    monkeypatch.setattr(memory, "run_job", run)
    rows = list(memory_rows([("resnet20", 4)], list(runs), len(next(iter(runs.values()))), print))
    return rows, asked


def test_a_rank_reports_the_peak_of_its_whole_process():
    first, second = spawn(2, memory_on_loopback, "penstock-exact-native")
    assert first == second
    weights = 269_722 * 4  # ResNet-20's, and as many bytes of gradients
    assert first["peak_nbytes"] > first["imports_nbytes"] + 2 * weights
    assert first["imports_nbytes"] > 50e6


def test_the_peer_is_measured_without_our_wrapper(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "penstock.torch", None)  # any import of it now fails
    find_wrapper("ddp-views")(3)
    with pytest.raises(ImportError):
        find_wrapper("penstock-exact")(3)


def test_an_unknown_method_is_named():
    with pytest.raises(PenstockError, match="no method called 'ddp-vews'; wanted one of ddp-views, penstock-exact"):
        find_wrapper("ddp-vews")


def test_methods_take_turns_and_medians_are_compared_with_bucket_views(monkeypatch):
    stock = [run_of(100, 40), run_of(300, 100), run_of(200, 80)]
    ours = [run_of(204, 90), run_of(206, 80), run_of(203, 80)]
    rows, asked = rows_of(monkeypatch, {"ddp-views": stock, "penstock-exact": ours})
    assert asked == ["ddp-views", "penstock-exact"] * 3
    assert [(row["peak_nbytes"], row["spread_nbytes"]) for row in rows] == [(200, 200), (204, 3)]
    assert rows[1]["ratio_to_views"] == pytest.approx(1.02)
    assert rows[1]["ratio_range"] == pytest.approx(204 / 100 - 206 / 300)
    assert rows[1]["ratio_less_imports"] == pytest.approx(123 / 120)
    assert [(claim.value, claim.holds) for claim in claims(rows)] == [
        (pytest.approx(1.02), False),
        (pytest.approx(123 / 120), False),
    ]


def test_without_the_peer_nothing_is_compared_or_claimed(monkeypatch):
    rows, _ = rows_of(monkeypatch, {"penstock-exact": [run_of(5, 1)]})
    assert rows[0]["ratio_to_views"] is None
    assert claims(rows) == []


def test_a_codec_is_compared_but_nothing_is_asked_of_it(monkeypatch):
    rows, _ = rows_of(monkeypatch, {"ddp-views": [run_of(5, 1)], "penstock-onebit": [run_of(10, 1)]})
    assert rows[1]["ratio_to_views"] == 2
    assert claims(rows) == []
