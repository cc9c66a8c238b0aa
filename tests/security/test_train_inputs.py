"""What a checkpoint or an option may name: no code from a checkpoint, no record outside of `--out`, none lost."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.cli.train_jobs import make_job
from penstock.errors import PenstockError, TrainError
from penstock.run_record import folder_name, run_file
from penstock.torch.saved_folder import MODEL, rank_file
from penstock.train.job import Job, Saved, find_checkpoint, write_saved

TASK = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
def make(): ...
"""


@pytest.fixture
def planted(tmp_path):
    """Return a checkpoint whose job names a file beside it, and that file."""
    file = tmp_path / "task.py"
    file.write_text(TASK)
    path = tmp_path / "saved" / "step-00000005"
    path.mkdir(parents=True)
    saved = Saved(path, 5, 1.0, 2, Job(task=f"{file}:make"), None)
    write_saved(saved, dict.fromkeys((MODEL, "rank-0.state", "rank-1.state"), "0" * 64))
    return path, file


def test_resuming_runs_no_file_that_the_checkpoint_names(planted):
    path, file = planted
    assert find_checkpoint(str(path)).step == 5
    result = CliRunner().invoke(app, ["train", "--resume", str(path), "--steps", "9"])
    assert isinstance(result.exception, TrainError)
    assert "not run because a checkpoint says so; wanted --task FILE.py:make" in str(result.exception)
    assert not file.with_name("ran").exists()


def test_resuming_takes_the_file_from_the_command_line_wherever_it_is_now(planted, tmp_path):
    path, _ = planted
    job = make_job({"resume": str(path), "steps": 9, "task": "/elsewhere/task.py:make"})
    assert job.task == "/elsewhere/task.py:make"


def test_resuming_imports_no_module_that_the_checkpoint_names(tmp_path):
    saved = Saved(tmp_path, 5, 1.0, 1, Job(task="antigravity:fly"), None)
    write_saved(saved, dict.fromkeys((MODEL, "rank-0.state"), "0" * 64))
    with pytest.raises(TrainError, match="not run because a checkpoint says so"):
        make_job({"resume": str(tmp_path), "steps": 9})


@pytest.mark.parametrize("task", ["other.py:make", "task.py:other", "chars"])
def test_resuming_with_another_task_is_refused(planted, task):
    with pytest.raises(PenstockError, match="--task: found"):
        make_job({"resume": str(planted[0]), "steps": 9, "task": task})


def test_resuming_starts_no_million_of_workers_that_the_checkpoint_names(tmp_path):
    saved = Saved(tmp_path, 5, 1.0, 2, Job(workers=1_000_000, servers=999_998), None)
    write_saved(saved, dict.fromkeys((MODEL, "rank-0.state", "rank-1.state"), "0" * 64))
    with pytest.raises(TrainError, match="1000000 workers are not started because a checkpoint of 2 says so"):
        make_job({"resume": str(tmp_path), "steps": 9})
    assert make_job({"resume": str(tmp_path), "steps": 9, "workers": 3}).workers == 3


def test_resuming_counts_bytes_of_no_interface_that_the_checkpoint_names(tmp_path):
    job = Job(where="emulated hosts, 1gbit", nic="eth7")
    write_saved(Saved(tmp_path, 5, 1.0, 4, job, None), dict.fromkeys((MODEL, *map(rank_file, range(4))), "0" * 64))
    resumed = make_job({"resume": str(tmp_path), "steps": 9})
    assert (resumed.where, resumed.nic) == ("loopback", "")


NAMES = ["..", ".", "../up", "/etc/penstock", "a/b", "a\\b", "x" * 300, "x\0y", "a\nb", "\ud800", "---", "...."]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_are_no_folder_of_ours_are_refused_before_training(name, monkeypatch):
    monkeypatch.setattr("penstock.train.start_workers.run_job", lambda *_: pytest.fail("a worker was started"))
    result = CliRunner().invoke(app, ["train", "--name", name])
    assert isinstance(result.exception, TrainError)
    assert str(result.exception).startswith("--name: found ")
    assert "\n" not in str(result.exception)


@pytest.mark.parametrize("name", [*NAMES, "../" * 200, "é" * 200, f"{'long/' * 80}mine.cll, exact plan"])
def test_every_record_lies_in_a_folder_of_its_own_inside_out(name, tmp_path):
    path = run_file(str(tmp_path), name)
    assert path.resolve().parent.parent == tmp_path.resolve()
    path.parent.mkdir()
    path.touch()


def test_two_long_names_that_begin_alike_have_two_folders():
    assert folder_name("x" * 400 + "a") != folder_name("x" * 400 + "b")
    assert Path(folder_name("onebit, exact plan")).name == "onebit-exact-plan"
