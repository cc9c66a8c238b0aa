"""A worker that dies is named by all others, whatever they were doing; checkpoints are whole or not there."""

import shutil
from pathlib import Path

import pytest

import train_jobs
from penstock.network import LinearCost, Network, save_network
from penstock.torch.saved_folder import complete_checkpoints, publish
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


def test_a_checkpoint_that_is_being_removed_is_none_any_more(tmp_path, monkeypatch):
    """rmtree takes files one by one; a process that dies meanwhile must not leave half a checkpoint by its name."""
    target, partial = tmp_path / "step-00000004", tmp_path / ".step-00000004.partial"
    for folder in (target, partial, tmp_path / "step-00000002"):
        folder.mkdir()
        (folder / "rank-0.state").touch()

    def half(path, **_):
        (path / "rank-0.state").unlink()
        raise Killed

    monkeypatch.setattr(shutil, "rmtree", half)
    with pytest.raises(Killed):
        publish(partial, target, 1)
    assert all((path / "rank-0.state").exists() for path in complete_checkpoints(tmp_path))


def test_the_next_checkpoint_tidies_up_what_a_dead_process_left(tmp_path):
    for name in (".step-00000007.partial", ".step-00000003.removed"):
        (tmp_path / name).mkdir()
    spawn(1, train_jobs.run, {"task": TINY, "steps": 1, "planner": "stock", "save": str(tmp_path)})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
