"""Slots against real locks: threads of one process do not exclude one another's `flock`, so holders are processes."""

import errno
import os
import signal
import subprocess
import sys
import threading

import pytest

from penstock.cluster.slots import claim, clean_dead_runs, dead_slots, try_lock
from penstock.cluster.topology import SLOTS
from penstock.errors import ClusterError

HOLD = """
import sys, time
from pathlib import Path
from penstock.cluster.slots import claim
slot = claim(Path(sys.argv[1]))
if len(sys.argv) > 2:
    slot.note()
    import subprocess
    subprocess.Popen(["timeout", "60", "cat", sys.argv[2]], pass_fds=[slot.lock], stdout=subprocess.DEVNULL)
print(slot.index, flush=True)
time.sleep(60)
"""


class FakeKernel:
    """Knows namespaces by name only, and which were deleted."""

    def __init__(self, *names):
        self.names, self.deleted = list(names), []

    def namespaces(self):
        return list(self.names)

    def remove(self, namespace):
        self.names.remove(namespace)
        self.deleted.append(namespace)


@pytest.fixture
def hold(tmp_path):
    """Start processes that hold a slot each; they end with the test."""
    started = []

    def start(*options):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path), *options], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process, int(process.stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_live_runs_have_different_slots(hold, tmp_path):
    (_, one), (_, other) = hold(), hold()
    assert (one, other, claim(tmp_path).index) == (0, 1, 2)


def test_a_slot_is_free_again_once_released(tmp_path):
    slot = claim(tmp_path)
    slot.files.mkdir()
    slot.release()
    assert list(tmp_path.iterdir()) == []
    assert claim(tmp_path).index == 0


def test_a_live_runs_slot_is_not_dead_and_a_killed_ones_is(hold, tmp_path):
    process, index = hold()
    assert dead_slots(FakeKernel(), tmp_path) == []
    process.kill()
    process.wait()
    assert [slot.index for slot in dead_slots(FakeKernel(), tmp_path)] == [index]


def test_what_a_dead_launcher_has_started_with_its_lock_is_waited_for(hold, tmp_path):
    os.mkfifo(tmp_path / "end")
    process, index = hold(str(tmp_path / "end"))  # its command ends when somebody has opened and closed this
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert try_lock(index, tmp_path) is None  # the command it started still holds the lock
    threading.Timer(0.3, (tmp_path / "end").write_text, [""]).start()
    assert [slot.index for slot in dead_slots(FakeKernel(), tmp_path)] == [index]


def test_namespaces_without_a_file_belong_to_nobody_and_are_removed(tmp_path):
    kernel = FakeKernel("penstock-3-switch", "penstock-3-host0", "somebody-elses")
    assert [(run.slot, run.namespaces) for run in clean_dead_runs(kernel, tmp_path)] == [(3, 2)]
    assert kernel.names == ["somebody-elses"]
    assert list(tmp_path.iterdir()) == []


def test_namespaces_of_a_live_run_are_kept(hold, tmp_path):
    _, index = hold()
    kernel = FakeKernel(f"penstock-{index}-host0", "penstock-9-host0")
    assert [run.slot for run in clean_dead_runs(kernel, tmp_path)] == [9]
    assert kernel.deleted == ["penstock-9-host0"]


def test_a_namespace_that_cannot_be_removed_is_named_and_its_slot_kept(tmp_path):
    class Stubborn(FakeKernel):
        def remove(self, namespace):
            raise OSError(errno.EBUSY, "Device or resource busy")

    with pytest.raises(ClusterError, match="namespace penstock-3-host0 cannot be removed: Device or resource busy"):
        clean_dead_runs(Stubborn("penstock-3-host0"), tmp_path)
    assert (tmp_path / "cluster-3").exists()


def test_a_file_removed_between_open_and_lock_is_not_mistaken_for_a_slot(tmp_path, monkeypatch):
    """The loser of that race would hold a lock on a file nobody else can see."""
    real_open, opened = os.open, []

    def open_then_remove(path, flags, mode=0o777):
        descriptor = real_open(path, flags, mode)
        opened.append(descriptor)
        if len(opened) == 1:
            os.unlink(path)
        return descriptor

    monkeypatch.setattr(os, "open", open_then_remove)
    slot = try_lock(0, tmp_path)
    assert slot is not None
    assert len(opened) == 2
    assert os.path.samestat(os.stat(tmp_path / "cluster-0"), os.fstat(slot.lock))


def test_when_all_slots_are_in_use_the_user_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.cluster.slots.try_lock", lambda index, directory: None)
    with pytest.raises(ClusterError, match=f"all {SLOTS} emulated clusters of this machine are in use"):
        claim(tmp_path)


def test_a_state_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ClusterError, match=r"file/state/cluster-0: Not a directory; live runs are noted there"):
        claim(tmp_path / "file" / "state")
