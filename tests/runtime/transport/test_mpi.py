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


@pytest.mark.slow
def test_a_rank_that_gave_up_and_left_is_not_taken_for_the_one_that_it_waited_for() -> None:
    if not has_fault_tolerance():
        pytest.skip("this Open MPI was built without fault tolerance")
    assert_all_ok(mpirun(3, "departure", "--with-ft", "ulfm"), 3)


def test_when_a_rank_dies_mpirun_ends_the_others() -> None:
    done = mpirun(3, "death")  # long before their timeout of 1000 seconds, or `mpirun` here runs into its own
    assert done.returncode != 0
    assert "ok" not in done.stdout


STATE = """
from mpi4py import MPI
found = MPI.COMM_WORLD.Get_errhandler() == MPI.ERRORS_RETURN, MPI.COMM_SELF.Get_errhandler() == MPI.ERRORS_RETURN
print(MPI.Is_initialized(), MPI.Query_thread(), *found)
"""
LATE = """
from penstock.errors import TransportError
from penstock.runtime import connect
def give_up(seconds, call, silence, is_vain):
    raise ConnectionError(silence)
connect.within = give_up
for _ in range(2):
    try:
        connect.join_engine("mpi")[0]()
    except TransportError as error:
        print(error)
"""


def python(text: str) -> str:
    paths = ":".join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths}
    ran = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_mpi_that_we_start_is_for_many_threads_and_raises_exceptions() -> None:
    found = python(f"import penstock.runtime.transport.mpi\n{STATE}\nprint(MPI.THREAD_MULTIPLE)").split()
    assert found == ["True", found[-1], "True", "True", found[-1]]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["multiple", "serialized", "funneled"])
def test_mpi_is_started_as_mpi4py_would(level: str) -> None:
    rc = f"import mpi4py; mpi4py.rc.thread_level = {level!r}"
    assert python(f"{rc}\nimport penstock.runtime.transport.mpi\n{STATE}") == python(f"{rc}\n{STATE}")


def test_an_mpi_that_does_not_start_in_time_is_a_lost_rank_that_is_not_known() -> None:
    first, again = python(LATE).splitlines()
    assert first.startswith("mpi: rank 0, step joining the other ranks: ")
    assert first.endswith("MPI did not start within 300 s: its start waits for all ranks; which rank is not known")
    assert again.endswith("cannot be started again in the same process; which rank is not known")
