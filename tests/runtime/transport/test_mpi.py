"""The same strategies over MPI, started by `mpirun`."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mpi4py")
TESTS = Path(__file__).parents[2]
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
pytestmark = pytest.mark.skipif(MPIRUN is None, reason="no mpirun on PATH (pip install penstock[mpi])")


def mpirun(world_size: int, case: str, *options: str, seed: int = 0) -> subprocess.CompletedProcess[str]:
    paths = [str(TESTS), *(path for path in sys.path if path)]
    command = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", *options, "-n", str(world_size)]
    command += ["-x", "PYTHONPATH", sys.executable, str(TESTS / "runtime" / "mpi_worker.py"), case, str(seed)]
    environment = {**os.environ, "PYTHONPATH": ":".join(paths)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)


def has_fault_tolerance() -> bool:
    told = subprocess.run([str(Path(str(MPIRUN)).with_name("ompi_info"))], capture_output=True, text=True, check=False)
    return "FT MPI support: yes" in told.stdout


def assert_all_ok(done: subprocess.CompletedProcess[str], world_size: int) -> None:
    said = sorted(re.findall(r"^ok \d+$", done.stdout, re.MULTILINE))  # libraries print colour codes when they end
    assert said == [f"ok {rank}" for rank in range(world_size)], done.stderr


@pytest.mark.parametrize("world_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 4, 5))])
def test_every_strategy_does_over_mpi_what_its_collective_promises(world_size: int) -> None:
    assert_all_ok(mpirun(world_size, "everything"), world_size)


@pytest.mark.slow
def test_a_rank_that_stays_away_from_a_call_is_noticed_within_the_timeout() -> None:
    assert_all_ok(mpirun(4, "absence"), 4)


@pytest.mark.slow
def test_ranks_in_different_calls_are_told_both() -> None:
    assert_all_ok(mpirun(3, "disagreement"), 3)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_with_ulfm_the_others_are_told_who_died(seed: int) -> None:
    if not has_fault_tolerance():
        pytest.skip("this Open MPI was built without fault tolerance")
    done = mpirun(3, "bereavement", "--with-ft", "ulfm", seed=seed)
    assert len([line for line in done.stdout.splitlines() if line.startswith("ok ")]) == 2, done.stderr


def test_when_a_rank_dies_mpirun_ends_the_others() -> None:
    done = mpirun(3, "death")  # long before their timeout of 1000 seconds, or `mpirun` here runs into its own
    assert done.returncode != 0
    assert "ok" not in done.stdout
