"""Kernels are compiled by one process, before they are waited for, and found again."""

import sys
import threading
import time
from importlib import resources
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from penstock.plan import Route
from penstock.runtime import rehearse as module
from penstock.runtime.rehearse import Compiling, rehearse

ONEBIT = Route("ring", "onebit")


@pytest.fixture
def compiled(monkeypatch):
    """Rehearse nothing, and return the routes that would have been."""
    found = []
    monkeypatch.setattr(module, "rehearse", found.append)
    return found


def test_a_route_is_compiled_once(compiled, tmp_path):
    assert Compiling((), tmp_path).ready(ONEBIT)
    again = Compiling((), tmp_path)
    assert again.is_ready(ONEBIT)
    assert not again.ready(ONEBIT)
    assert compiled == [ONEBIT]
    assert not again.is_ready(Route("ring", "bf16"))
    assert not again.is_ready(Route("all_gather", "onebit"))


def test_a_text_that_changes_is_compiled_again(compiled, tmp_path):
    mine = tmp_path / "mine.cll"
    shipped = (resources.files("penstock.compll") / "algorithms" / "onebit.cll").read_text()
    for text in (shipped, shipped + "\n// changed\n"):
        mine.write_text(text)
        assert Compiling((), tmp_path / "kernels").ready(Route("ring", str(mine)))
    assert len(compiled) == 2


def test_who_comes_while_another_compiles_waits_and_compiles_nothing(compiled, monkeypatch, tmp_path):
    entered, leave = threading.Event(), threading.Event()

    def slowly(route):
        compiled.append(route)
        entered.set()
        assert leave.wait(60)

    monkeypatch.setattr(module, "rehearse", slowly)
    answers = []
    ranks = [threading.Thread(target=lambda: answers.append(Compiling((), tmp_path).ready(ONEBIT))) for _ in range(3)]
    for rank in ranks:
        rank.start()
    assert entered.wait(60)
    leave.set()
    for rank in ranks:
        rank.join(60)
    assert sorted(answers) == [False, False, True]
    assert compiled == [ONEBIT]


def test_where_nothing_can_be_kept_every_process_compiles_for_itself(compiled, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    for _ in range(2):
        assert Compiling((ONEBIT,), blocked / "kernels").ready(ONEBIT)
    assert compiled == [ONEBIT, ONEBIT]


def test_a_codec_that_cannot_be_compiled_fails_where_it_is_used_not_here(monkeypatch, tmp_path):
    def fail(_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(module, "rehearse", fail)
    compiling = Compiling((), tmp_path)
    assert compiling.ready(ONEBIT)
    assert not compiling.is_ready(ONEBIT)


def test_other_processes_compile_in_the_background_one_for_each_place(monkeypatch, tmp_path):
    monkeypatch.setattr(module.sys, "executable", _sleeper(tmp_path))
    first = Compiling((ONEBIT, Route("ring", "bf16")), tmp_path)
    second = Compiling((ONEBIT, Route("ring", "bf16")), tmp_path)
    assert 1 <= len(first._children) <= module.PROCESSES
    assert second._children == []  # as many as may are at it
    children = list(first._children)
    first.stop()
    assert all(child.poll() is not None for child in children)
    assert len(Compiling((ONEBIT,), tmp_path)._children) == 1  # the place is free again


def test_processes_in_the_background_run_while_something_waits_for_them_and_not_otherwise(
    compiled, monkeypatch, tmp_path
):
    monkeypatch.setattr(module.sys, "executable", _sleeper(tmp_path))
    compiling = Compiling((ONEBIT,), tmp_path)
    (child,) = compiling._children
    compiling.pause()
    assert _until(lambda: _state(child) == "T")
    marker = module._marker(tmp_path, ONEBIT)
    with module._lock(marker.with_suffix(".lock")):  # as if the child had it
        waits = threading.Thread(target=compiling.ready, args=(ONEBIT,))
        waits.start()
        assert _until(lambda: _state(child) == "S")
        marker.touch()
        waits.join(60)
    assert _until(lambda: _state(child) == "T")
    assert compiled == []
    compiling.stop()


def _state(child):
    return Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def _until(true, seconds=60.0):
    ends = time.monotonic() + seconds
    while not true() and time.monotonic() < ends:
        time.sleep(0.01)
    return true()


def _sleeper(folder):
    """Return a program that does nothing for a minute, whatever it is told."""
    path = folder / "sleeper"
    path.write_text("#!/bin/sh\nexec sleep 60\n")
    path.chmod(0o755)
    return str(path)


def test_where_another_process_does_not_come_to_it_the_work_is_done_here(compiled, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "TAKE_OVER_SECONDS", 0.1)
    marker = module._marker(tmp_path, ONEBIT)
    holder = get_context("spawn").Process(target=_hold, args=(str(marker.with_suffix(".lock")), str(tmp_path / "held")))
    holder.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    compiling = Compiling((), tmp_path)
    assert compiling.ready(ONEBIT)  # though the lock is another's, which never ends
    assert compiled == [ONEBIT]
    holder.kill()
    holder.join()


def _hold(lock, said):
    import fcntl
    from pathlib import Path

    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        Path(said).touch()
        time.sleep(60)


def test_the_background_process_compiles_what_it_is_told_and_says_so(compiled, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_end_with_parent", lambda: None)
    module.main(str(tmp_path), ["ring+onebit", "ring+bf16"])
    assert compiled == [ONEBIT, Route("ring", "bf16")]
    assert Compiling((), tmp_path).is_ready(ONEBIT)
    module.main(str(tmp_path), ["ring+onebit"])
    assert len(compiled) == 2


@pytest.mark.parametrize(
    "route", [ONEBIT, Route("gtopk", "sparse(density=0.01)"), Route("hierarchical(outer=ring)", "onebit")]
)
def test_a_rehearsal_calls_every_kernel_that_training_does(route, monkeypatch):
    from penstock.codecs.feedback import DeferredResidual
    from penstock.codecs.registry import make_codec
    from penstock.compll.backends.numba.backend import NumbaKernels
    from penstock.runtime.communicator import Communicator
    from runtime.threads import run_ranks

    called = set()
    kernel = NumbaKernels.kernel
    monkeypatch.setattr(NumbaKernels, "kernel", lambda self, kind: called.add(kind) or kernel(self, kind))
    rehearse(route)
    rehearsed, _ = set(called), called.clear()
    if not route.strategy.startswith("hierarchical"):

        def train(transport):
            communicator, codec = Communicator(transport), make_codec(route.codec)
            residual = DeferredResidual(np.zeros(4096, np.float32))
            for _ in range(3):
                communicator.all_reduce(np.ones(4096, np.float32), route.strategy, codec, residual)

        run_ranks(4, train)
    assert called <= rehearsed


def test_compiling_needs_no_torch():
    import subprocess

    text = "import sys, penstock.runtime.rehearse; sys.exit('torch' in sys.modules or 'numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0
