"""A checkpoint is read as it was written or refused in one line, and a full disk leaves the last one as it is."""

import errno
import os
import pickle
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import train_jobs
from penstock.errors import FormatError, PenstockError, TrainError
from penstock.exchange.state import check_states
from penstock.integrations.exchange_files import file_name, read_exchange, save_exchange, write_exchange
from penstock.torch.arrays import TORCH
from penstock.torch.checkpoint_folder import check_model, fitting
from penstock.train.job import find_checkpoint
from penstock.train.loop import History
from penstock.train.save_state import load_common, load_own, random_state, set_random_state, undisturbed
from spawn import spawn

TINY = f"{Path(__file__).parents[1] / 'train_tasks.py'}:Tiny"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a checkpoint that two ranks wrote."""
    folder = tmp_path_factory.mktemp("saved")
    spawn(2, train_jobs.run, {"task": TINY, "steps": 2, "planner": "stock", "save": str(folder)})
    return find_checkpoint(str(folder)).path


def load(path):
    """Read all of a checkpoint."""
    saved = find_checkpoint(str(path))
    return [load_common(saved, torch.device("cpu")), *(load_own(saved, rank) for rank in range(saved.world_size))]


def refusal(path):
    with pytest.raises(PenstockError) as raised:
        load(path)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)
    return str(raised.value)


def test_one_flipped_bit_anywhere_is_refused(whole, tmp_path):
    copy = Path(shutil.copytree(whole, tmp_path / whole.name))
    load(copy)
    draw, files = random.Random(20), sorted(copy.iterdir())
    assert [file.name for file in files] == ["SHA256SUMS", "job.json", "model.state", "rank-0.state", "rank-1.state"]
    for number in range(150):
        file = files[number % len(files)]
        data = file.read_bytes()
        damaged, bit = bytearray(data), draw.randrange(8 * len(data))
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        refusal(copy)
        file.write_bytes(data)
    load(copy)


def test_a_damaged_newest_checkpoint_leaves_the_one_before(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "step-00000001")
    newest = Path(shutil.copytree(whole, tmp_path / "step-00000002"))
    assert find_checkpoint(str(tmp_path)).path == newest
    for name in ("model.state", "rank-1.state", "job.json", "SHA256SUMS"):
        written = (newest / name).read_bytes()
        (newest / name).write_bytes(written[:-9] + b"x" + written[-8:])
        with pytest.warns(UserWarning, match=f"{newest}/.* going on from step-00000001, the one before"):
            assert find_checkpoint(str(tmp_path)).path.name == "step-00000001"
        refusal(newest)  # which was named, and no other is taken for it
        (newest / name).write_bytes(written)
    for path in tmp_path.iterdir():
        (path / "model.state").write_bytes(b"")
    with pytest.raises(FormatError, match=f"{newest}/model.state: file: found '0 bytes"):
        find_checkpoint(str(tmp_path))


FOREIGN = {
    "nothing": b"",
    "text": b"these are no weights\n",
    "a pickle": pickle.dumps({"model": 1}),
    "bytes": bytes(range(256)),
}


@pytest.mark.parametrize("name", ["SHA256SUMS", "job.json", "model.state", "rank-1.state"])
def test_what_is_no_file_of_a_checkpoint_is_refused(name, whole, tmp_path):
    copy = Path(shutil.copytree(whole, tmp_path / whole.name))
    written = (copy / name).read_bytes()
    for content in (*FOREIGN.values(), written[: len(written) // 2], written + b"\0"):
        (copy / name).write_bytes(content)
        assert f"{copy}/" in refusal(copy)
    (copy / name).unlink()
    refusal(copy)


@pytest.mark.parametrize("name", ["SHA256SUMS", "model.state", "rank-1.state"])
def test_a_pipe_or_a_device_in_a_checkpoint_is_not_read_for_ever(name, whole, tmp_path):
    copy = Path(shutil.copytree(whole, tmp_path / whole.name))
    (copy / name).unlink()
    os.mkfifo(copy / name)
    assert f"{copy / name}: file: found 'a pipe or a device'" in refusal(copy)
    (copy / name).unlink()
    (copy / name).symlink_to("/dev/zero")
    assert f"{copy / name}: file: found 'a pipe or a device'" in refusal(copy)


def test_files_of_another_checkpoint_are_refused(whole, tmp_path):
    copy = Path(shutil.copytree(whole, tmp_path / whole.name))
    shutil.copy(copy / "rank-0.state", copy / "rank-1.state")
    assert "rank-1.state: file: found " in refusal(copy)


def test_sha256sum_agrees(whole):
    if shutil.which("sha256sum") is None:
        pytest.skip("no sha256sum here")
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=whole, check=True, capture_output=True)


def fill_up(rank, options, full_rank):
    """Train; from the second checkpoint on, the disk of one rank is full."""
    from penstock.torch import checkpoint_folder as checkpoint

    real, calls = checkpoint.write_state, []

    def write_state(path, values):
        calls.append(path)
        if len(calls) <= (2 if rank == 0 else 1) or rank != full_rank:
            return real(path, values)
        path.write_bytes(b"half of")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoint.write_state = write_state
    try:
        train_jobs.run(rank, options)
    except PenstockError as error:
        return str(error)


@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_full_disk_is_named_by_all_ranks_and_the_last_checkpoint_stays(full_rank, tmp_path):
    options = {"task": TINY, "steps": 6, "planner": "stock", "save": str(tmp_path), "save_every": 2}
    said = spawn(2, fill_up, options, full_rank)
    assert said[0] == said[1]
    file = tmp_path / ".step-00000004.partial" / f"rank-{full_rank}.state"
    assert said[0] == (
        f"rank {full_rank} could not write {file}: No space left on device; "
        "wanted a folder with room for a checkpoint; step-00000002 is whole and stays"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
    load(tmp_path / "step-00000002")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_disk_that_is_really_full_keeps_the_last_checkpoint(whole, tmp_path):
    need = sum(file.stat().st_size for file in whole.iterdir())
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(1.6 * need)}", "penstock-test", str(tmp_path)]
    if (
        subprocess.run(["sh", "-c", "command -v mount"], capture_output=True).returncode
        or subprocess.run(mount, capture_output=True).returncode
    ):
        pytest.skip("nothing can be mounted here")
    try:
        options = {"task": TINY, "steps": 6, "planner": "stock", "save": str(tmp_path), "save_every": 2}
        said = spawn(2, outcome, options)
        assert said[0] == said[1]
        assert "No space left on device" in said[0]
        assert "is whole and stays" in said[0]
        load(tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def outcome(rank, options):
    """Train and return what was raised."""
    try:
        return str(train_jobs.run(rank, options))
    except PenstockError as error:
        return str(error)


def test_a_state_of_another_model_is_one_line_that_names_its_file(whole):
    saved = find_checkpoint(str(whole))
    common = load_common(saved, torch.device("cpu"))
    wanted = r"model\.state: model: found .*; wanted .*, as this run's model has it"
    with pytest.raises(FormatError, match=wanted) as raised:
        check_model(saved.path / "model.state", torch.nn.Linear(7, 7), common["model"])
    assert "\n" not in str(raised.value)


def test_a_name_of_two_lines_does_not_make_two_of_the_error():
    state = {"two\nlines": torch.ones(1)}
    with pytest.raises(FormatError) as raised:
        check_model(Path("model.state"), torch.nn.Module(), state)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("steps", [None, [None], [(1, 2)], [(1, 2, "x")], [("x", 1, 1)], 3])
def test_a_history_that_none_has_written_does_not_fit(steps, whole):
    with pytest.raises(FormatError), fitting(whole / "model.state"):
        History().load({"steps": steps, "evaluations": []})


@pytest.mark.parametrize("position", [-1, 625, 10**9])
def test_a_random_state_that_would_be_read_outside_of_its_memory_is_refused(position):
    state = random_state()
    kind, key, _, *rest = state["numpy"]
    with undisturbed(), pytest.raises(FormatError, match=f"reads at {position} of 624"), fitting(Path("rank-0.state")):
        set_random_state(state | {"numpy": (kind, key, position, *rest)})


# What ranks keep, in the checkpoints of other frameworks


def kept(rank):
    memories = {"residual": {"weight": torch.randn(4, 6), "bias": torch.randn(6).bfloat16().float()}}
    return {"format": "penstock-exchange/2", "rank": rank, "world_size": 2, "iterations": 3, "scale": 1.0} | {
        "memories": memories
    }


def test_exchange_files_come_back_to_the_bit(tmp_path):
    states = [kept(rank) for rank in range(2)]
    for rank, state in enumerate(states):
        write_exchange(tmp_path / file_name(rank, 2), state)
    found = read_exchange(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0-of-2.state", "rank-1-of-2.state"]
    for state, again in zip(states, found, strict=True):
        for name, value in state["memories"]["residual"].items():
            assert torch.equal(value, again["memories"]["residual"][name])
        assert {**state, "memories": 0} == {**again, "memories": 0}


def test_an_exchange_file_with_any_bit_flipped_is_refused(tmp_path):
    write_exchange(path := tmp_path / file_name(0, 1), kept(0))
    whole = path.read_bytes()
    draw = random.Random(1)
    for damaged in (b"", b"x", whole[:-1], whole[: len(whole) // 2], whole + b"\n", pickle.dumps({"format": 1})):
        path.write_bytes(damaged)
        with pytest.raises(FormatError, match=f"{path}: file: found "):
            read_exchange(tmp_path)
    for _ in range(60):
        bits, bit = bytearray(whole), draw.randrange(8 * len(whole))
        bits[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bits)
        with pytest.raises(FormatError, match=f"{path}: file: found '{len(whole)} bytes"):
            read_exchange(tmp_path)


def test_a_pipe_among_exchange_files_is_not_read_for_ever(tmp_path):
    os.mkfifo(tmp_path / file_name(0, 2))
    with pytest.raises(FormatError, match="found 'a pipe or a device'"):
        read_exchange(tmp_path)


def test_a_full_disk_leaves_the_exchange_file_before(tmp_path, monkeypatch):
    write_exchange(path := tmp_path / file_name(0, 1), kept(0))
    before = path.read_bytes()

    def full(target, values):
        target.write_bytes(b"half of")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("penstock.integrations.exchange_files.write_state", full)
    with pytest.raises(FormatError, match="No space left on device"):
        write_exchange(path, kept(0))
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [before]


class Keeping:
    """A wrapper that keeps something, on all ranks."""

    process_group = None

    def __init__(self, value):
        self.value = value

    def exchange_state_dict(self):
        return {"value": self.value}


def save_where_one_disk_is_full(rank, folder):
    """Save; save again where rank 1 cannot write, by itself; save once more. Return what files held after each."""
    place, found = Path(folder) / "penstock-exchange", []

    def files():
        torch.distributed.barrier()
        values = [each["value"] for each in read_exchange(place)]
        found.append((values, sorted(path.name for path in place.iterdir())))
        torch.distributed.barrier()

    save_exchange(Keeping(1), folder)
    files()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("penstock.integrations.exchange_files.os.fsync", full_disk)
        with pytest.raises(TrainError) as raised:
            save_exchange(Keeping(2), folder)
    files()
    save_exchange(Keeping(3), folder)
    files()
    return str(raised.value), found


def full_disk(_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_is_full_on_one_rank_is_raised_on_all_and_all_files_before_stay(tmp_path):
    names = ["rank-0-of-2.state", "rank-1-of-2.state"]
    for said, found in spawn(2, save_where_one_disk_is_full, str(tmp_path)):
        assert said.startswith(
            f"rank 1 could not write {tmp_path}/penstock-exchange/rank-1-of-2.state: file: found 'No "
        )
        assert found == [([1, 1], names), ([1, 1], names), ([3, 3], names)]


def test_files_of_another_number_of_ranks_go_once_the_new_ones_are_there(tmp_path):
    spawn(2, save_alone_or_not, str(tmp_path))
    spawn(1, save_alone_or_not, str(tmp_path))
    assert [path.name for path in (tmp_path / "penstock-exchange").iterdir()] == ["rank-0-of-1.state"]


def save_alone_or_not(rank, folder):
    save_exchange(Keeping(rank), folder)


@pytest.mark.parametrize(
    "memories", [{3: {}, "x": {}}, {"residual": {3: torch.ones(2)}}, {"residual": {None: 1, "x": 2}}]
)
def test_a_state_with_names_that_are_no_text_is_refused(memories):
    with pytest.raises(FormatError, match="memories"):
        check_states([kept(0) | {"world_size": 1, "memories": memories}], {"weight": (4, 6)}, TORCH)
