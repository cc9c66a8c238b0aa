"""A worker that dies is named by all others, whatever they were doing; checkpoints are whole or not there."""

import shutil
from pathlib import Path

import pytest

import train_jobs
from penstock.network import LinearCost, Network, save_network
from penstock.torch.saved_folder import begin, checkpoint_path, complete_checkpoints, publish, step_of
from penstock.train.job import find_checkpoint
from spawn import spawn, spawn_outcomes

TINY = f"{Path(__file__).parents[1] / 'train_tasks.py'}:Tiny"
STEP = ("penstock.train.loop", "to_device", 3)  # others share buffers, or already wait in a ring of ours
DEATHS = {
    "between steps": STEP,
    "while a checkpoint is written": ("penstock.torch.checkpoint_folder", "_write", 2),
    "before the first step": ("penstock.train.method", "_alone_seconds", 2),
    "sharing losses": ("penstock.train.loop", "share", 2),
    "evaluating": ("penstock.train.loop", "mean_metric", 2),
    "comparing weights": ("penstock.train.worker", "same_weights", 1),
    "making the record": ("penstock.train.worker", "make_record", 1),
}
QUICK = ("between steps", "while a checkpoint is written")


@pytest.fixture
def options(tmp_path):
    lines = {"ring": LinearCost(1e-4, 1e-9)}
    save_network(Network(3, 1e-4, 1e-9, 1e-10, lines), tmp_path / "network.json")
    saving = {"save": str(tmp_path / "saved"), "save_every": 2}
    return {"task": TINY, "steps": 6, "planner": "single", "strategy": "ring", "evaluate_every": 2} | saving | {
        "network": str(tmp_path / "network.json")
    }  # fmt: skip


@pytest.mark.parametrize(
    "death", [death if death in QUICK else pytest.param(death, marks=pytest.mark.slow) for death in DEATHS]
)
def test_all_others_name_the_rank_that_died(options, death):
    ended = spawn_outcomes(3, train_jobs.survive, options, 1, *DEATHS[death])
    assert ended[1].exit_code == -9
    for rank in (0, 2):
        said = str(ended[rank].value).split("; ")[-1]  # on a very busy machine another rank's note may come too late
        assert "rank 1" in said
        assert said.endswith("did not answer: it died, hangs, or has ended")
    if death == "while a checkpoint is written":  # the first one is whole, the second is not there
        assert find_checkpoint(options["save"]).step == 2
        assert [path.name for path in complete_checkpoints(Path(options["save"]))] == ["step-00000002"]


@pytest.mark.slow
def test_torchs_own_wrapper_loses_a_rank_in_the_same_words(options):
    ended = spawn_outcomes(3, train_jobs.survive, options | {"planner": "stock"}, 1, *STEP)
    assert all("rank 1" in ended[rank].value and "did not answer" in ended[rank].value for rank in (0, 2))


class Killed(BaseException):
    """Stands in for the end of the process."""


def checkpoint(folder, what):
    """Make a folder with the two files of a small checkpoint."""
    folder.mkdir(parents=True)
    for name in ("rank-0.state", "model.state"):
        (folder / name).write_text(what)


def kill_at(monkeypatch, moment):
    """Have the process end at the given one of the moments at which `publish` changes the disk: before it, or half."""
    calls = [0]

    def dies():
        calls[0] += 1
        return calls[0] == moment

    rename, rmtree = Path.rename, shutil.rmtree

    def renaming(path, target):
        if dies():
            raise Killed
        return rename(path, target)

    def removing(path, **options):
        if dies():  # rmtree takes files one by one
            (path / "model.state").unlink()
            raise Killed
        rmtree(path, **options)

    monkeypatch.setattr(Path, "rename", renaming)
    monkeypatch.setattr(shutil, "rmtree", removing)


@pytest.mark.parametrize("before", [[], [2], [4], [2, 4], [1, 2, 4], [2, 4, 6]])
def test_whenever_the_process_dies_there_is_a_whole_checkpoint(before, tmp_path, monkeypatch):
    for moment in range(1, 12):
        folder = tmp_path / str(moment)
        for step in before:
            checkpoint(checkpoint_path(folder, step), "old")
        with monkeypatch.context() as patch:
            kill_at(patch, moment)
            begin(partial := folder / ".step-00000004.partial")
            partial.rmdir()
            checkpoint(partial, "new")
            try:
                publish(partial, checkpoint_path(folder, 4), 1)
                died = False
            except Killed:
                died = True
        there = complete_checkpoints(folder)
        assert there or not before
        assert all({file.read_text() for file in path.iterdir()} < {"old", "new"} for path in there)
        assert all(len(list(path.iterdir())) == 2 for path in there)
        begin(folder / ".step-00000008.partial")  # the next process tidies up
        steps = [step_of(path) for path in complete_checkpoints(folder)]
        assert len(set(steps)) == len(steps)
        if not died:
            break
    assert not died
    assert (folder / "step-00000004" / "model.state").read_text() == "new"
    assert steps == sorted({*before, 4} - {1})  # the two newest of those up to step 4, and later ones


def test_the_next_checkpoint_tidies_up_what_a_dead_process_left(tmp_path):
    for name in (".step-00000007.partial", ".step-00000003.removed"):
        (tmp_path / name).mkdir()
    spawn(1, train_jobs.run, {"task": TINY, "steps": 1, "planner": "stock", "save": str(tmp_path)})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


PLANTED = {  # what may lie in a folder of checkpoints: what a user linked elsewhere to make room, or put there
    "an old one is a link": "step-00000001",
    "the hidden folder is a link": ".step-00000004.partial",
    "a removed one is a link": ".step-00000004.removed",
    "one of the same step is a link": "step-00000004",
    "one that takes another's place is a link": "step-00000004.again",
}


@pytest.mark.parametrize("name", PLANTED.values(), ids=PLANTED.keys())
@pytest.mark.parametrize("kind", ["a folder", "a file", "nothing"])
def test_links_and_files_among_checkpoints_stop_no_later_one_and_what_links_lead_to_stays(name, kind, tmp_path):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "saved"
    folder.mkdir()
    if kind == "a folder":
        checkpoint(elsewhere, "old")
    elif kind == "a file":
        elsewhere.write_text("old")
    (folder / name).symlink_to(elsewhere)
    for step in (4, 5, 6):
        begin(partial := folder / f".step-{step:08d}.partial")
        partial.rmdir()
        checkpoint(partial, "new")
        publish(partial, checkpoint_path(folder, step), 1)
    assert [path.name for path in complete_checkpoints(folder)] == ["step-00000005", "step-00000006"]
    assert not list(folder.glob(".step-*"))
    assert elsewhere.exists() == (kind != "nothing")
    assert kind != "a folder" or len(list(elsewhere.iterdir())) == 2
