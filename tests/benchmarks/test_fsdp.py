"""The study of sharded training: what it claims of its rows, and that it can be stopped and called again."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import fsdp  # noqa: E402

SCRIPT = Path(fsdp.__file__)
JOB = fsdp.Job("time", "", "cpu", "gpt-1m", "1gbit", 1, 2, 4, 60.0, False, False, 1.0, 0, 0)


def test_ratios_of_medians_are_compared_with_what_is_wanted(tmp_path):
    job = replace(JOB, out=str(tmp_path / "out.json"))
    rows = {fsdp.NONE: [10.0, 11.0, 90.0], fsdp.NATIVE: [30.0, 31.0, 32.0], fsdp.CODED: [12.0, 12.0, 50.0]}
    fsdp.write_times(job, rows, {}, 1000)
    faster, slower = json.loads(Path(job.out).read_text())["claims"]
    assert (faster["value"], faster["holds"]) == (31 / 12, True)
    assert (slower["value"], slower["holds"]) == (12 / 11, True)


def test_losses_are_compared_once_all_steps_are_done(tmp_path):
    job = replace(JOB, task="loss", out=str(tmp_path / "out.json"))
    fsdp.write_losses(job, {fsdp.NATIVE: [2.0] * 4, fsdp.CODED: [2.0] * 3})
    assert json.loads(Path(job.out).read_text())["claims"] == []
    fsdp.write_losses(job, {fsdp.NATIVE: [2.0] * 4, fsdp.CODED: [2.1] * 4})
    (found,) = json.loads(Path(job.out).read_text())["claims"]
    assert found["value"] == pytest.approx(1.05)
    assert not found["holds"]


def test_a_batch_depends_on_rank_and_step_alone():
    model, data = fsdp.MODELS["gpt-1m"], fsdp.text()
    assert torch.equal(fsdp.batch_of(model, data, 1, 7), fsdp.batch_of(model, data, 1, 7))
    assert not torch.equal(fsdp.batch_of(model, data, 1, 7), fsdp.batch_of(model, data, 2, 7))
    assert not torch.equal(fsdp.batch_of(model, data, 1, 7), fsdp.batch_of(model, data, 1, 8))


@pytest.mark.slow
@pytest.mark.root
def test_training_that_was_stopped_goes_on(tmp_path):
    out = tmp_path / "loss.json"
    for seconds in ("0", "500"):
        command = [sys.executable, SCRIPT, "loss", out, "--model", "gpt-1m", "--steps", "60", "--seconds", seconds]
        subprocess.run([*command, "--measure-seconds", "1"], check=True, timeout=500)
    record = json.loads(out.read_text())
    assert [row["steps"] for row in record["rows"]] == [60, 60]
    assert record["claims"][0]["holds"]
