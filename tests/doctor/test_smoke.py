"""The smoke test on this machine, and what it says where it fails."""

import json
import subprocess
import sys

import pytest

from penstock.cluster.processes import Collected, Worker
from penstock.doctor import State
from penstock.doctor import smoke as smoking

pytest.importorskip("torch")


@pytest.mark.parametrize("engine", ["gloo", "mpi"])
def test_two_workers_add_up_a_vector(engine):
    if engine == "mpi":
        pytest.importorskip("mpi4py", reason="no mpi4py: pip install 'penstock[mpi]'")
    found = smoking.smoke(engine)
    assert found.state is State.WORKS, found
    assert found.found.startswith("400 kB all-reduced by ring in ")


def test_a_worker_that_fails_is_quoted(monkeypatch):
    code = "import sys; print('noise', file=sys.stderr); raise ValueError('no route')"
    monkeypatch.setattr(smoking, "workers_of", lambda _: [Worker(0, (sys.executable, "-c", code))])
    found = smoking.smoke("gloo")
    assert found.state is State.BROKEN
    assert found.found == "ValueError: no route"
    assert "torchrun" in found.remedy


def test_workers_that_hang_are_ended(monkeypatch):
    hang = [Worker(0, (sys.executable, "-c", "import time; time.sleep(60)"))]
    monkeypatch.setattr(smoking, "workers_of", lambda _: hang)
    monkeypatch.setattr(smoking, "SMOKE_SECONDS", 0.5)
    assert "still ran after 0.5 s" in smoking.smoke("gloo").found


def test_a_silent_failure_is_said_to_be_one():
    assert smoking.complaint(Collected(), 0) == "it said nothing"


@pytest.mark.slow
def test_the_verb_prints_every_finding_as_json():
    command = [sys.executable, "-m", "penstock", "doctor", "--no-smoke-test", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    findings = json.loads(result.stdout)
    names = {"Python", "torch", "cores", "gloo", "NCCL", "MPI", "emulated hosts", "GPU hosts", "cache"}
    assert names <= {finding["name"] for finding in findings}
    assert all(finding["state"] == "works" or finding["remedy"] for finding in findings)
    assert result.returncode == any(finding["state"] == "broken" for finding in findings)
