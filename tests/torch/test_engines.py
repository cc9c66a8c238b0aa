"""Gradients over MPI beside a gloo group: the same bits as over gloo, and clear words where the two do not fit."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from penstock.errors import PlanError
from penstock.torch.ddp import DistributedDataParallel
from penstock.torch.engines import _complaint

TESTS = Path(__file__).parents[1]
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


@pytest.mark.slow
def test_over_mpi_the_wrapper_does_what_it_does_over_gloo(tmp_path):
    pytest.importorskip("mpi4py")
    if MPIRUN is None:
        pytest.skip("no mpirun on PATH (pip install penstock[mpi])")
    paths = [str(TESTS), *(path for path in sys.path if path)]
    command = [MPIRUN, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "3", sys.executable]
    command += [str(TESTS / "torch_mpi_worker.py"), str(tmp_path / "store")]
    environment = {**os.environ, "PYTHONPATH": ":".join(paths), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert sorted(re.findall(r"^ok \d$", done.stdout, re.MULTILINE)) == ["ok 0", "ok 1", "ok 2"], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("what", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize(
    ("point", "step", "cause"),
    [
        ("start", "starting MPI", "MPI did not start within 3 s: its start waits for all ranks"),
        ("communicator", "making a communicator of MPI", "no communicator of MPI within 3 s"),
    ],
)
def test_ranks_of_mpi_end_where_one_is_lost_before_it_is_joined(tmp_path, point, step, cause, what):
    pytest.importorskip("mpi4py")
    if MPIRUN is None:
        pytest.skip("no mpirun on PATH (pip install penstock[mpi])")
    paths = [str(TESTS), *(path for path in sys.path if path)]
    command = [MPIRUN, "--with-ft", "ulfm", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "3"]
    command += [sys.executable, str(TESTS / "torch_mpi_lost.py"), str(tmp_path / "store"), point, what]
    environment = {**os.environ, "PYTHONPATH": ":".join(paths), "GLOO_SOCKET_IFNAME": "lo"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as job:
        alarm = threading.Timer(120, job.kill)
        alarm.start()
        lines = [line.decode().strip() for line in _until_all_raised(job)]
        job.wait()
        alarm.cancel()
    assert job.returncode != -signal.SIGKILL, "survivors did not end by themselves"
    said = sorted(line for line in lines if line.startswith("rank "))
    assert [line.split(" raised ")[0] for line in said] == ["rank 0", "rank 1"], lines
    for line in said:
        assert f"step {step}: " in line
        if what == "SIGSTOP" or point == "start":
            assert cause in line
            assert line.endswith("rank 2 did not answer: it died, hangs, or has ended")
        else:
            assert line.endswith("rank 2 died")


def _until_all_raised(job):
    """Yield what ranks print; once two have raised, end the one that was lost, which mpirun would wait for."""
    lost, raised = None, 0
    for line in job.stdout:
        yield line
        lost = int(line.split()[1]) if line.startswith(b"strikes ") else lost
        raised += b" raised " in line
        if lost is not None and raised == 2:
            with contextlib.suppress(ProcessLookupError):
                os.kill(lost, signal.SIGKILL)
            lost = None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ("No module named 'mpi4py'", "rank 1 has no mpi4py (No module named 'mpi4py'); `pip install 'penstock[mpi]'`"),
        ((0, 1, True), "rank 1 of 4 in the process group is rank 0 of 1 in MPI; start all workers by one mpirun"),
        ((2, 4, True), "rank 1 of 4 in the process group is rank 2 of 4 in MPI"),
        ((1, 4, False), "MPI allows calls from one thread only on rank 1; wanted MPI_THREAD_SERIALIZED"),
    ],
)
def test_what_does_not_fit_is_said_with_its_rank(found, words):
    assert words in str(_complaint(1, 4, found))


def test_nothing_is_said_where_all_fits():
    assert _complaint(1, 4, (1, 4, True)) is None


def test_an_unknown_engine_is_refused_before_anything_else():
    with pytest.raises(PlanError, match="no engine called 'smoke'; wanted 'mpi', or None for the process group's own"):
        DistributedDataParallel(torch.nn.Linear(1, 1), engine="smoke")
