"""`penstock bench collectives`: rows, floors, predictions; and one real run on loopback."""

import json
import subprocess
import sys

import pytest

from penstock.bench.collective_times import CASES, floor_seconds, predicted_seconds
from penstock.bench.jobs import Place, plain_bucket
from penstock.cluster.building import LimitRate, setup_steps
from penstock.cluster.topology import plan_layout
from penstock.network import Network

FIELDS = {"hosts", "rate", "engine", "operation", "strategy", "implementation", "nbytes", "seconds", "spread"}


@pytest.mark.parametrize(
    ("operation", "milliseconds"), [("all_reduce", 192.0), ("broadcast", 128.0), ("reduce", 128.0)]
)
def test_the_floor_is_what_one_nic_must_move_at_its_rate(operation, milliseconds):
    assert floor_seconds(Place(4, "1gbit"), operation, 16_000_000) == pytest.approx(milliseconds * 1e-3)


@pytest.mark.parametrize("rate", ["loopback", "none"])
def test_there_is_no_floor_where_no_rate_is_set(rate):
    assert floor_seconds(Place(4, rate), "broadcast", 16_000_000) is None


def test_a_prediction_is_the_simulators_time_of_the_same_program():
    network = Network(workers=4, alpha_seconds=0.0, beta_seconds_per_byte=8e-9, gamma_seconds_per_byte=0.0)
    ring = predicted_seconds(Place(4, "1gbit"), "all_reduce", "ring", 16_000_000, network)
    assert ring == pytest.approx(0.192, rel=1e-6)


def bench(*arguments):
    command = [sys.executable, "-m", "penstock", "bench", "collectives", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.slow
def test_a_run_on_loopback_prints_every_case_and_keeps_the_record(tmp_path):
    pytest.importorskip("torch")
    quick = ("--rounds", "1", "--no-measure", "--patience", "0")
    done = bench("--hosts", "2", "--rate", "loopback", "--engine", "gloo", "--sizes", "4096", *quick, "--json",
                 "--out", str(tmp_path / "record.json"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["operation"], row["strategy"]) for row in rows] == list(CASES)
    for row in rows:
        assert row.keys() >= FIELDS
        assert row["implementation"] == ("gloo" if row["strategy"] == "native" else "penstock")
        assert row["seconds"] > 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["rows"] == rows
    assert {"machine", "versions", "commit", "command"} <= record.keys()


def test_an_unknown_engine_is_one_line():
    done = bench("--engine", "carrier-pigeon")
    assert done.returncode == 2
    assert done.stderr == "penstock: --engine: found 'carrier-pigeon'; wanted gloo or mpi, with a comma between\n"


def test_unknown_links_are_one_line():
    done = bench("--hosts", "2", "--links", "golden")
    assert done.returncode == 2
    assert done.stderr == "penstock: links 'golden'; wanted smooth or coarse\n"


def test_coarse_links_have_the_same_rate_and_one_bucket():
    steps = list(setup_steps(plan_layout(0, (10**9, None), 1, None), plain_bucket))
    limited = [step.bucket for step in steps if isinstance(step, LimitRate)]
    assert [bucket.bits_per_second for bucket in limited] == [10**9] * 2
    assert [bucket.peak_bits_per_second for bucket in limited] == [None] * 2
