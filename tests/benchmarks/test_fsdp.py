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
JOB = fsdp.Job(
    task="time", out="", device="cpu", across=False, model="gpt-1m", rate="1gbit", rounds=1, iterations=2, steps=4,
    seeds=2, seconds=60.0, bf16=False, keeps_weights=False, measure_seconds=1.0, sequences=0, tokens=0,
)  # fmt: skip


def test_ratios_of_medians_are_compared_with_what_is_wanted(tmp_path):
    job = replace(JOB, out=str(tmp_path / "out.json"))
    rows = {fsdp.NONE: [10.0, 11.0, 90.0], fsdp.NATIVE: [30.0, 31.0, 32.0], fsdp.CODED: [12.0, 12.0, 50.0]}
    fsdp.write_times(job, rows | {fsdp.ALONE: [9.0, 9.0, 10.0]}, rows | {fsdp.ALONE: [9.0]}, {}, 1000)
    faster, slower, alone = json.loads(Path(job.out).read_text())["claims"]
    assert (faster["value"], faster["holds"]) == (31 / 12, True)
    assert (slower["value"], slower["holds"]) == (12 / 11, True)
    assert (alone["value"], alone["holds"]) == (12 / 9, False)


def test_held_out_losses_are_compared_once_all_seeds_are_done(tmp_path):
    job = replace(JOB, task="loss", out=str(tmp_path / "out.json"), methods=(fsdp.NATIVE, fsdp.CODED))
    learnt = {(seed, fsdp.NATIVE): fsdp.Learnt([9.0] * 4, [3.0, 2.0]) for seed in range(2)}
    learnt |= {(0, fsdp.CODED): fsdp.Learnt([9.0] * 4, [3.0, 2.01]), (1, fsdp.CODED): fsdp.Learnt([9.0] * 3, [3.0])}
    fsdp.write_losses(job, learnt)
    assert json.loads(Path(job.out).read_text())["claims"] == []
    for end, holds in ((2.02, True), (2.06, False)):
        fsdp.write_losses(job, learnt | {(1, fsdp.CODED): fsdp.Learnt([9.0] * 4, [3.0, end])})
        (found,) = json.loads(Path(job.out).read_text())["claims"]
        assert found["value"] == pytest.approx((2.01 + end) / 4.0)
        assert found["holds"] == holds


def test_torch_s_loss_is_taken_from_an_earlier_record_of_the_same_job_until_it_was_trained_as_far(tmp_path):
    first, second = (replace(JOB, task="loss", seeds=1, out=str(tmp_path / name)) for name in ("first", "second"))
    both = {(0, fsdp.NATIVE): fsdp.Learnt([9.0] * 4, [2.0]), (0, fsdp.CODED): fsdp.Learnt([9.0] * 4, [7.0])}
    fsdp.write_losses(first, both)
    second, ours = replace(second, beside=first.out), {(0, fsdp.CODED): fsdp.Learnt([9.0] * 4, [2.01])}
    for torchs, end in ((None, 2.0), (fsdp.Learnt([9.0] * 3, [5.0]), 2.0), (fsdp.Learnt([9.0] * 4, [2.1]), 2.1)):
        fsdp.write_losses(second, ours | ({} if torchs is None else {(0, fsdp.NATIVE): torchs}))
        record = json.loads(Path(second.out).read_text())
        assert record["claims"][0]["value"] == pytest.approx(2.01 / end)
        sources = [row.get("from", {}).get("record") for row in record["rows"]]
        assert sources == [None, "first" if end == 2.0 else None]  # ours, torch's
    with pytest.raises(SystemExit, match="is of a job with steps=4; wanted 5"):
        fsdp.earlier_rows(replace(second, steps=5))


def test_what_another_commit_has_kept_is_refused(tmp_path):
    torch.save({"commit": "one"}, tmp_path / "rank-0.pt")
    assert fsdp.load(tmp_path / "rank-0.pt", "one") == {"commit": "one"}
    with pytest.raises(SystemExit, match="was kept by commit one, this is another"):
        fsdp.load(tmp_path / "rank-0.pt", "another")


def test_a_batch_depends_on_rank_step_and_seed_alone():
    model, data = fsdp.MODELS["gpt-1m"], fsdp.texts(JOB)[0]
    assert torch.equal(fsdp.batch_of(model, data, 1, 7), fsdp.batch_of(model, data, 1, 7))
    assert not torch.equal(fsdp.batch_of(model, data, 1, 7), fsdp.batch_of(model, data, 2, 7))
    assert not torch.equal(fsdp.batch_of(model, data, 1, 7), fsdp.batch_of(model, data, 1, 8))
    assert not torch.equal(fsdp.batch_of(model, data, 1, 7), fsdp.batch_of(model, data, 1, 7, seed=1))


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
