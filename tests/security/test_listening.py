"""What listens on a machine while its workers train: nothing that another machine could reach."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("torch")
from penstock.cluster.building import run_command
from penstock.cluster.processes import free_port
from penstock.cluster.worker_commands import find_mpirun, mpirun_workers, plan_local_mpirun

LISTENERS = """
import os
from pathlib import Path
from penstock.runtime.transport.c10d import start_gloo
{start}
own = {{os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if os.path.islink(fd)}}
lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{{name}}").read_text().splitlines()[1:]]
print(sorted(each[1].split(":")[0] for each in lines if each[3] == "0A" and f"socket:[{{each[9]}}]" in own), flush=True)
os._exit(0)
"""
STARTS = {
    "train": "from penstock.train.worker import process_group\ncontext = process_group('cpu', 1)\ncontext.__enter__()",
    "communicator": "transport = start_gloo()",
}


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="Linux says what listens")
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_on_one_machine_only_loopback_listens(start, address):
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run(
        [sys.executable, "-c", LISTENERS.format(start=STARTS[start])],
        env={**os.environ, **meeting, "RANK": "0", "WORLD_SIZE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.stdout.strip() in ("['0100007F']", "['0100007F', '0100007F']"), ran.stdout + ran.stderr


OVER_MPI = """
import os
from mpi4py import MPI
from pathlib import Path
MPI.COMM_WORLD.Barrier()
lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
listening = {f"socket:[{each[9]}]": each[1].split(":")[0].strip("0") for each in lines if each[3] == "0A"}
def found(pid):
    files = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if os.path.islink(file)]
    return sorted({listening[each] for each in files if each in listening})
def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
launcher = os.getppid()
while Path(f"/proc/{launcher}/comm").read_text().strip() != "prterun":
    launcher = parent(launcher)
print("rank", found("self"), "launcher", found(launcher), flush=True)
"""


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="Linux says what listens")
@pytest.mark.parametrize("start", ["train", "bench"])
def test_over_mpi_on_one_machine_only_the_launcher_listens_elsewhere(start):
    pytest.importorskip("mpi4py")
    command = [sys.executable, "-c", OVER_MPI]
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:  # Open MPI's sockets want short paths
        if start == "train":
            worker = plan_local_mpirun(2, Path(scratch), find_mpirun(run_command), command, {})
        else:
            (worker,) = mpirun_workers(2, command, {})
        ran = subprocess.run(worker.argv, capture_output=True, text=True, timeout=120)
    said = [line for line in ran.stdout.splitlines() if "rank [" in line]
    # SECURITY.md says so of the launcher; where Open MPI learns better, correct it.
    assert len(said) == 2, ran.stdout + ran.stderr
    assert all(line.endswith("rank [] launcher ['', '100007F']") for line in said), said
