"""`penstock train` as a user starts it: refused, whole, interrupted, with a worker that dies, under torchrun."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.cli.train_jobs import make_job
from penstock.cli.train_run import print_runs
from penstock.errors import PenstockError
from penstock.run_record import load_run, run_document

TASKS = Path(__file__).parents[1] / "train_tasks.py"
TINY = f"{TASKS}:Tiny"
QUICK = ("--task", TINY, "--workers", 2, "--planner", "stock")


def command(*arguments):
    return [sys.executable, "-m", "penstock", "train", *map(str, arguments)]


def train(*arguments):
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False)


def only_line(result):
    (line,) = result.stderr.strip().splitlines()
    return line


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the folder and the output of a run of two steps."""
    folder = tmp_path_factory.mktemp("run")
    return folder, train(*QUICK, "--steps", 2, "--save", folder / "saved", "--out", folder / "runs", "--json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--task", "cats"), "no task called 'cats'; wanted one of chars, digits, or FILE.py:function"),
        (("--task", "nowhere.py:f"), "nowhere.py: no such file; wanted FILE.py:function"),
        (("--task", f"{TASKS}:nothing"), "has no function 'nothing'"),
        (("--task", f"{TASKS}:half"), "returned object without name, metric_name"),
        (("--planner", "best"), "no planner called 'best'"),
        (("--strategy", "rong"), "--strategy: found 'rong'; wanted one of auto, "),
        (("--codec", "twobit"), "codec 'twobit'; wanted one of"),
        (("--stock", "--codec", "onebit"), "--codec onebit with stock DDP, which has no codecs"),
        (("--density", "0.01"), "--density without --codec"),
        (("--codec", "topk", "--density", "2"), "--density: found 2; wanted a part such as 0.001"),
        (("--device", "abacus"), "--device: found 'abacus'; wanted one of cpu, cuda"),
        (("--engine", "carrier-pigeon"), "--engine: found 'carrier-pigeon'"),
        (("--workers", "-1"), "-1 workers, 100 steps, batch 0: wanted at least 1 of each"),
        (("--rate", "fast"), "fast"),
        (("--network", "nowhere.json"), "nowhere.json: file: found 'No such file"),
        (("--resume", "nowhere"), "nowhere: no checkpoint there; wanted a folder that `penstock train --save` wrote"),
    ],
)
def test_bad_options_are_refused_before_any_worker_starts(options, message, monkeypatch):
    def fail(*_):
        raise AssertionError("a worker was started")

    monkeypatch.setattr("penstock.train.launch.run_job", fail)
    result = CliRunner().invoke(app, ["train", *options])
    assert isinstance(result.exception, PenstockError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_the_shell_sees_one_line_and_exit_code_2():
    result = train("--resume", "nowhere")
    assert result.returncode == 2
    assert only_line(result).startswith("penstock: nowhere: no checkpoint there")


def test_a_run_keeps_its_record_and_json_is_one_line_per_event(finished):
    folder, result = finished
    assert result.returncode == 0, result.stderr
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [event["event"] for event in events][:: len(events) - 1] == ["ready", "done"]
    assert {"loss", "samples_per_second", "exposed_seconds"} <= {key for event in events for key in event}
    run = load_run(folder / "runs" / "stock-DDP" / "run.json")
    assert run_document(run) == events[-1]["record"]
    assert (len(run.steps), run.where) == (2, "loopback")


def test_a_table_shows_runs_side_by_side(finished, capsys):
    run = load_run(finished[0] / "runs" / "stock-DDP" / "run.json")
    faster = replace(run, name="twice as fast", iteration_seconds=run.iteration_seconds / 2)
    print_runs([run, faster], json=False)
    shown = capsys.readouterr().out
    assert f"{run.evaluations[-1].metric:.4g}" in shown
    assert "1.00x" in shown
    assert "2.00x" in shown


def test_a_failing_worker_is_named_in_one_line():
    result = train("--task", f"{TASKS}:failing", "--workers", 2, "--planner", "stock", "--json")
    assert result.returncode == 1
    assert only_line(result).startswith("penstock: rank 1 failed: ValueError: this batch is bad (train_tasks.py:")


def begin(tmp_path, *options):
    """Start a slow job and wait until it trains."""
    arguments = ("--task", f"{TASKS}:slow", "--workers", 2, "--planner", "stock", "--steps", 10000, "--json", *options)
    process = subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while json.loads(process.stdout.readline())["event"] != "steps":
        pass
    return process


def test_ctrl_c_saves_says_so_once_and_exits_with_130(tmp_path):
    process = begin(tmp_path, "--save", tmp_path)
    process.send_signal(signal.SIGINT)
    output, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    assert complaint.strip() == f"penstock: stopped; go on with `penstock train --resume {tmp_path}`"
    last = json.loads(output.splitlines()[-1])
    resumed = train("--resume", tmp_path, "--steps", last["step"] + 3, "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout.splitlines()[0])["step"] == last["step"]


def test_a_killed_worker_ends_the_job_with_its_rank(tmp_path):
    process = begin(tmp_path)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 1
    assert complaint.strip() == "penstock: rank 1 was ended by SIGKILL; the other workers were ended too"
    time.sleep(0.1)
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_options_that_would_change_the_bits_are_refused_on_resume(finished):
    folder = str(finished[0] / "saved")
    with pytest.raises(
        PenstockError, match="--seed: found 9, but the checkpoint was made with 1; leave the option out"
    ):
        make_job({"resume": folder, "seed": 9, "steps": 4})
    with pytest.raises(PenstockError, match="at step 2 of 2 already; ask for more with --steps"):
        make_job({"resume": folder})
    assert make_job({"resume": folder, "steps": 4}).task == TINY


def test_torchruns_workers_join():
    arguments = ["--nproc-per-node", "2", "--master-port", "29661", "-m", "penstock", "train", "--task", TINY]
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments, "--planner", "stock", "--steps", "3", "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    last = json.loads(result.stdout.splitlines()[-1])
    assert last["event"] == "done"
    assert last["record"]["workers"] == 2
