import json
import subprocess
import sys

import pytest

from penstock.cli.main import main
from penstock.cluster import emulated_cluster
from penstock.errors import ClusterError

FIELDS = {"hosts", "rate", "model", "method", "iteration_seconds", "spread", "exposed_seconds", "bytes_sent"}


@pytest.fixture
def hosts():
    """Skip where this machine cannot emulate hosts, and say why."""
    try:
        with emulated_cluster(hosts=1, rate="1gbit"):
            return
    except ClusterError as error:
        pytest.skip(str(error))


def bench(*arguments):
    command = [sys.executable, "-m", "penstock", "bench", *arguments, "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def complaint_of(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["penstock", "bench", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.root
@pytest.mark.slow
def test_training_on_emulated_hosts_gives_rows_and_a_record(hosts, tmp_path):
    record = tmp_path / "train.json"
    few = ("--hosts", "2", "--rounds", "1", "--iterations", "1", "--warmup", "3", "--out", str(record))
    rows = bench("train", "--models", "resnet20:2", "--methods", "ddp,ddp-powersgd", "--startup", "none", *few)
    assert [row["method"] for row in rows] == ["no-communication", "ddp", "ddp-powersgd"]
    assert set(rows[1]) >= FIELDS
    assert 269_722 * 4 < rows[1]["bytes_sent"] < 1.1 * 269_722 * 4  # each of two hosts sends every gradient once
    assert "error" in rows[2] or set(rows[2]) >= FIELDS
    assert json.loads(record.read_text())["rows"] == rows
    starts = bench("train", "--models", "resnet20:2", "--startup-only", "--startup", "penstock-exact", *few)
    assert [(row["method"], row["start"]) for row in starts] == [("penstock-exact", "cold"), ("penstock-exact", "warm")]
    saved = json.loads(record.read_text())
    assert (saved["rows"], saved["startup"]["rows"]) == (rows, starts)  # the rows of the record stay


@pytest.mark.root
@pytest.mark.slow
def test_replaying_on_emulated_hosts_gives_measured_beside_simulated(hosts):
    rows = bench("replay", "--hosts", "2", "--traces", "googlenet", "--planners", "single,exact", "--iterations", "1")
    assert [(row["hosts"], row["what"], row["how"]) for row in rows] == [
        (2, "googlenet", "single"),
        (2, "googlenet", "exact"),
    ]
    wire_seconds = 53_513_120 * 8 / 1e9
    assert all(row["measured_seconds"] > 0.95 * wire_seconds for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "--models", "vgg"), "--models: no model of the zoo is called 'vgg'"),
        (("train", "--methods", "horovod"), "no training method called 'horovod'"),
        (("train", "--rate", "loopback"), "--rate loopback: bytes are counted at the NICs of emulated hosts"),
        (("train", "--device", "tpu"), "--device: found 'tpu'; wanted cpu or cuda"),
        (("replay", "--hosts", "x"), "--hosts: found 'x'; wanted whole numbers > 0"),
        (("replay", "--planners", "best"), "no planner called 'best'"),
        (("replay", "--traces", "alexnet"), "alexnet"),
        (("replay", "--nbytes", "-1"), "'--nbytes'"),
    ],
)
def test_bad_input_is_one_line(capsys, monkeypatch, arguments, message):
    complaint = complaint_of(capsys, monkeypatch, *arguments)
    assert complaint.startswith("penstock: ")
    assert message in complaint
    assert complaint.count("\n") == 1
