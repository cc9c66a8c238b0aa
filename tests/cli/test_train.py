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

import train_jobs
from penstock.cli.main import app
from penstock.cli.train_jobs import check_job, make_job
from penstock.cli.train_run import print_runs
from penstock.cluster.building import run_command
from penstock.cluster.worker_commands import find_mpirun
from penstock.errors import PenstockError
from penstock.network import Network, save_network
from penstock.run_record import load_run, run_document
from spawn import spawn

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
        (("--task", "cats"), "no task called 'cats'; wanted one of chars, chars_gpt, digits, bert_base"),
        (
            ("--task", "nowhere.py:f"),
            "there is no file 'nowhere.py'; wanted FILE.py:function or package.module:function",
        ),
        (("--task", f"{TASKS}:nothing"), "has no function 'nothing'"),
        (("--task", f"{TASKS}:half"), "returned object without name, metric_name"),
        (("--planner", "best"), "no planner called 'best'"),
        (("--strategy", "rong"), "--strategy: found 'rong'; wanted one of auto, "),
        (("--codec", "twobit"), "codec 'twobit'; wanted one of"),
        (("--stock", "--codec", "onebit"), "--codec onebit with stock DDP, which has no codecs"),
        (("--density", "0.01"), "--density without --codec"),
        (("--amp", "fp8"), "--amp: found 'fp8'; wanted one of bf16, fp16"),
        (("--momentum", "1.5"), "--momentum: found 1.5; wanted 0 or more and less than 1"),
        (("--warmup", "paper"), "--warmup without --codec"),
        (
            ("--codec", "gtopk", "--warmup", "0.5,a"),
            "--warmup: found '0.5,a'; wanted paper, dgc or densities: 0.25,0.05",
        ),
        (("--codec", "gtopk", "--warmup", "slowly"), "warm-up 'slowly'; wanted paper or dgc"),
        (("--codec", "gtopk", "--warmup-every", "5"), "--warmup-every 5 without --warmup: wanted densities"),
        (("--codec", "onebit", "--warmup", "dgc"), "density or warmup with codec 'onebit'"),
        (("--codec", "topk", "--density", "2"), "--density: found 2; wanted a part such as 0.001"),
        (("--device", "abacus"), "--device: found 'abacus'; wanted one of cpu, cuda"),
        (("--engine", "carrier-pigeon"), "--engine: found 'carrier-pigeon'; wanted one of gloo, mpi"),
        (("--engine", "mpi", "--stock"), "--engine mpi with stock DDP, which sends through torch.distributed"),
        (("--rate", "fast"), "fast"),
        (("--network", "nowhere.json"), "nowhere.json: file: found 'No such file"),
        (("--resume", "nowhere"), "nowhere: no checkpoint there; wanted a folder that `penstock train --save` wrote"),
    ],
)
def test_bad_options_are_refused_before_any_worker_starts(options, message, monkeypatch):
    def fail(*_):
        raise AssertionError("a worker was started")

    monkeypatch.setattr("penstock.train.start_workers.run_job", fail)
    result = CliRunner().invoke(app, ["train", *options])
    assert isinstance(result.exception, PenstockError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_a_strategy_of_ranks_that_only_aggregate_makes_them_servers():
    strategy = "parameter_server(servers=2, dedicated=True)"
    job = make_job({"workers": 4, "strategy": strategy})
    assert (job.servers, job.all_reduce) == (2, "parameter_server(servers=2, dedicated=true)")
    with pytest.raises(PenstockError, match="--servers 1 and --strategy parameter_server"):
        make_job({"workers": 4, "servers": 1, "strategy": strategy})


def test_less_than_one_worker_is_refused_on_the_command_line_and_in_a_job():
    assert "Invalid value for '--workers': Input should be greater than or equal to 1" in only_line(
        train("--workers", -1)
    )
    with pytest.raises(PenstockError, match="-1 workers, 100 steps, batch 0: wanted at least 1 of each"):
        make_job({"task": TINY, "workers": -1}).check()


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("penstock.cli.train_jobs.find_spec", "--engine mpi needs mpi4py, which is not here; `pip install"),
        (
            "penstock.cluster.worker_commands.shutil.which",
            "engine mpi needs Open MPI's mpirun and found none; `pip install",
        ),
    ],
)
def test_without_mpi_its_engine_is_refused_before_any_worker_starts(missing, message, monkeypatch, tmp_path):
    if "which" in missing:
        pytest.importorskip("mpi4py")
    monkeypatch.setattr(missing, lambda name: None)
    monkeypatch.setattr("penstock.cluster.worker_commands.sys.executable", str(tmp_path / "python"))
    with pytest.raises(PenstockError, match=message):
        check_job(make_job({"engine": "mpi"}), "")


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


@pytest.mark.slow
def test_over_mpi_a_job_ends_with_the_bits_that_gloo_gives(tmp_path):
    pytest.importorskip("mpi4py")
    network = tmp_path / "network.json"
    save_network(Network(2, 1e-4, 1e-9, 1e-10), network)
    job = {"task": TINY, "steps": 2, "planner": "single", "strategy": "ring", "network": str(network)}
    options = [word for name, value in job.items() for word in (f"--{name}", value)]
    ours = train(*options, "--workers", 2, "--engine", "mpi", "--json")
    assert ours.returncode == 0, ours.stderr
    done = json.loads(ours.stdout.splitlines()[-1])
    (_, events), _ = spawn(2, train_jobs.run, job)
    assert done["weights_sha256"] == events[-1].values["weights_sha256"]
    assert (done["record"]["engine"], done["record"]["where"]) == ("mpi", "shared memory")
    assert events[-1].values["record"]["engine"] == "gloo"


@pytest.mark.slow
def test_mpirun_as_launcher_joins_stops_and_names_a_rank_that_dies(tmp_path):
    pytest.importorskip("mpi4py")
    mpirun = find_mpirun(run_command)
    joined = [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "2", *command("--task", TINY, "--steps", 2)]
    result = subprocess.run(
        [*joined, "--engine", "mpi", "--planner", "naive", "--json"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    record = json.loads(next(line for line in result.stdout.splitlines() if '"event": "done"' in line))["record"]
    assert (record["engine"], record["workers"], record["where"]) == ("mpi", 2, "as launched")

    options = ("--planner", "naive", "--engine", "mpi", "--workers", 2)
    process = begin(tmp_path, *options, "--save", tmp_path)
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=300)
    assert process.returncode == 130
    resume = f"penstock train --resume {tmp_path} --task {TASKS}:slow"
    assert complaint.strip() == f"penstock: stopped; go on with `{resume}`"

    process = begin(tmp_path, *options)
    ranks = [pid for pid in descendants(process.pid) if b"penstock.train.worker" in words_of(pid)[:3]]
    os.kill(next(pid for pid in ranks if b"OMPI_COMM_WORLD_RANK=1" in environment_of(pid)), signal.SIGKILL)
    _, complaint = process.communicate(timeout=300)
    assert process.returncode == 1
    assert complaint.strip() == "penstock: rank 1 was ended by SIGKILL; the other workers were ended too"
    assert all(soon_gone(pid) for pid in ranks)


def descendants(pid):
    """Return the processes that `pid` started, and those that they did."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for child in children for each in (child, *descendants(child))]


def soon_gone(pid):
    """Tell whether a process ends within a minute."""
    give_up = time.monotonic() + 60
    while (there := Path(f"/proc/{pid}").exists()) and time.monotonic() < give_up:
        time.sleep(0.05)
    return not there


def words_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def environment_of(pid):
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def begin(tmp_path, *options):
    """Start a slow job and wait until it trains."""
    arguments = ("--task", f"{TASKS}:slow", "--workers", 2, "--planner", "stock", "--steps", 10000, "--json", *options)
    process = subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while json.loads(process.stdout.readline())["event"] != "steps":
        pass
    return process


@pytest.mark.slow
def test_ctrl_c_saves_says_so_once_and_exits_with_130(tmp_path):
    process = begin(tmp_path, "--save", tmp_path)
    process.send_signal(signal.SIGINT)
    output, complaint = process.communicate(timeout=300)
    assert process.returncode == 130
    resume = f"penstock train --resume {tmp_path} --task {TASKS}:slow"
    assert complaint.strip() == f"penstock: stopped; go on with `{resume}`"
    last = json.loads(output.splitlines()[-1])
    resumed = train("--resume", tmp_path, "--task", f"{TASKS}:slow", "--steps", last["step"] + 3, "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout.splitlines()[0])["step"] == last["step"]


def test_a_killed_worker_ends_the_job_with_its_rank(tmp_path):
    process = begin(tmp_path)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    _, complaint = process.communicate(timeout=300)
    assert process.returncode == 1
    assert complaint.strip() == "penstock: rank 1 was ended by SIGKILL; the other workers were ended too"
    assert all(soon_gone(child) for child in children)


def test_options_that_would_change_the_bits_are_refused_on_resume(finished):
    folder = str(finished[0] / "saved")
    with pytest.raises(
        PenstockError, match="--seed: found 9, but the checkpoint was made with 1; leave the option out"
    ):
        make_job({"resume": folder, "task": TINY, "seed": 9, "steps": 4})
    with pytest.raises(PenstockError, match="--warmup-every: found 5, but the checkpoint was made with 0"):
        make_job({"resume": folder, "task": TINY, "warmup_every": 5, "steps": 4})
    with pytest.raises(PenstockError, match="at step 2 of 2 already; ask for more with --steps"):
        make_job({"resume": folder, "task": TINY})
    assert make_job({"resume": folder, "task": TINY, "steps": 4}).seed == 1


@pytest.mark.slow
def test_torchruns_workers_join():
    arguments = ["--standalone", "--nproc-per-node", "2", "-m", "penstock", "train", "--task", TINY]
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments, "--planner", "stock", "--steps", "3", "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    last = json.loads(result.stdout.splitlines()[-1])
    assert last["event"] == "done"
    assert last["record"]["workers"] == 2


def test_a_record_that_cannot_be_written_costs_neither_the_table_nor_the_next_run(tmp_path):
    """The folder can be written to as training begins; where the record belongs a file turns out to be."""
    (tmp_path / "mine").touch()
    result = train(*QUICK[:-2], "--steps", 2, "--name", "mine", "--out", tmp_path, "--compare", "--seed", 3)
    assert result.returncode == 2
    assert " mine " in result.stdout
    complaint = result.stderr.strip().splitlines()[-1]
    assert (
        complaint
        == f"penstock: {tmp_path}/mine/run.json: file: found 'Not a directory'; wanted a path that can be written"
    )
    assert load_run(tmp_path / "stock-DDP" / "run.json").steps
