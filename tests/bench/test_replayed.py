import json

import pytest

from bench_workers import replay_on_loopback
from penstock.bench import replayed
from penstock.bench.jobs import Place
from penstock.bench.replayed import ReplayJob, count_steps, replay_rows
from penstock.trace import Tensor, Trace, save_trace
from spawn import spawn

JOB = ReplayJob(("googlenet",), ("exact",), 2, ("native",), 1_000_000, 3)


def test_messages_and_plans_are_measured_beside_simulated(tmp_path):
    path = str(tmp_path / "toy.json")
    tensors = tuple(Tensor(f"t{i}", 1000, 0.002) for i in range(10))
    save_trace(Trace("toy", "none", 1, "float32", 0.01, tensors), path)
    (rows, finished), (others, _) = spawn(2, replay_on_loopback, (path,))
    assert [row["measured_seconds"] for row in rows] == [row["measured_seconds"] for row in others]
    assert [(row["what"], row["how"]) for row in rows] == [
        ("all-reduce of 0.004 MB", "native"),
        ("all-reduce of 0.004 MB", "ring"),
        (path, "single"),
        (path, "exact"),
    ]
    for row in rows:
        assert row["error"] == pytest.approx(row["simulated_seconds"] / row["measured_seconds"] - 1)
    assert rows[2]["measured_seconds"] >= 0.03
    assert len(finished) == 2 * 3 + 2 * 2
    json.dumps(rows)


def test_rows_say_where_and_how_fast_the_wire_would_be(monkeypatch):
    found = [{"what": "all-reduce of 1 MB", "how": "native"}, {"what": "googlenet", "how": "exact"}]
    monkeypatch.setattr(replayed, "run_job", lambda *_: [dict(row) for row in found])
    rows = list(replay_rows([Place(4, "1gbit"), Place(4, "none"), Place(2, "loopback")], JOB, print))
    assert [(row["hosts"], row["rate"]) for row in rows] == [
        (4, "1gbit"), (4, "1gbit"), (4, "none"), (4, "none"), (2, "loopback"), (2, "loopback"),
    ]  # fmt: skip
    assert rows[0]["floor_seconds"] == pytest.approx(1.5 * 8e6 / 1e9)
    assert all("floor_seconds" not in row for row in rows[1:])


def test_progress_counts_what_will_be_done():
    assert count_steps([Place(2, "none"), Place(4, "none")], JOB) == 2 * (3 + 4)
