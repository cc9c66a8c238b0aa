"""Ranks that share a GPU, without one: what they are told, and a multi-process service that only pretends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.cluster import emulated_cluster
from penstock.cluster.building import run_command
from penstock.cluster.gpus import CONTROL, SharedGpu, start_service, stop_service
from penstock.cluster.processes import Collected
from penstock.cluster.slots import processes_inside
from penstock.cluster.topology import plan_layout
from penstock.cluster.worker_commands import find_mpirun, plan_mpirun, plan_workers
from penstock.errors import ClusterError

LAYOUT = plan_layout(7, (10**9, 10**9))
SERVICE = SharedGpu(Path("/run/penstock/files-7"))
SHOW = "import json, os; print(json.dumps(dict(os.environ)))"
# As NVIDIA's: -d leaves a daemon in the background; without arguments it reads commands, and quit ends the daemon.
CONTROL_PROGRAM = """#!/bin/sh
echo "$@ $CUDA_MPS_PIPE_DIRECTORY ${CUDA_VISIBLE_DEVICES-unset}" >> @LOG@
if [ "$1" = -d ]; then
    setsid sleep @MARKER@ &
    echo $! > "$CUDA_MPS_PIPE_DIRECTORY/pid"
else
    read word; echo "$word" >> @LOG@; @QUIT@
fi
"""


def environments(gpu, per_host=1, extra=None):
    """Return the variables of each rank, as its command line sets them."""
    workers = plan_workers(LAYOUT, Path("/hosts"), ["train"], per_host, extra, gpu)
    return [dict(word.split("=", 1) for word in w.argv[w.argv.index("env") + 1 : -1]) for w in workers]


def test_every_rank_is_a_host_of_its_own_to_nccl_also_two_on_one_host():
    ranks = environments(SERVICE, per_host=2)
    assert len({rank["NCCL_HOSTID"] for rank in ranks}) == 4
    assert [rank["GROUP_RANK"] for rank in ranks] == ["0", "0", "1", "1"]
    assert {rank["LOCAL_WORLD_SIZE"] for rank in ranks} == {"2"}


def test_programs_that_take_their_local_rank_for_a_gpu_find_the_one_there_is():
    assert {rank["LOCAL_RANK"] for rank in environments(SERVICE, per_host=2)} == {"0"}
    assert [rank["LOCAL_RANK"] for rank in environments(None, per_host=2)] == ["0", "1", "0", "1"]


def test_nccl_and_gloo_use_the_limited_nic_and_nothing_else():
    for rank in environments(SERVICE) + environments(None):
        assert (rank["NCCL_SOCKET_IFNAME"], rank["GLOO_SOCKET_IFNAME"], rank["NCCL_IB_DISABLE"]) == (
            "eth0",
            "eth0",
            "1",
        )


def test_ranks_find_the_service_where_it_runs_and_are_told_of_none_where_it_does_not():
    assert environments(SERVICE)[0]["CUDA_MPS_PIPE_DIRECTORY"] == "/run/penstock/files-7/mps"
    assert "CUDA_MPS_PIPE_DIRECTORY" not in environments(SharedGpu(None, "why"))[0]
    assert "NCCL_HOSTID" in environments(SharedGpu(None, "why"))[0]
    assert "NCCL_HOSTID" not in environments(None)[0]


def test_what_the_user_sets_stands():
    assert {rank["NCCL_HOSTID"] for rank in environments(SERVICE, extra={"NCCL_HOSTID": "mine"})} == {"mine"}


def run_rank_shell(gpu, extra, tmp_path):
    """Return the variables that a rank's shell under mpirun sets, with Open MPI's own given."""
    argv = plan_mpirun(LAYOUT, tmp_path, tmp_path, "mpirun", [sys.executable, "-c", SHOW], 2, extra, gpu).argv
    shell = argv[len(argv) - 1 - argv[::-1].index("-c", 3) - 1 :]  # sh -c SCRIPT sh COMMAND...
    given = {"RANK": "3", "LOCAL_RANK": "1", "SIZE": "4", "LOCAL_SIZE": "2"}
    environment = {f"OMPI_COMM_WORLD_{name}": value for name, value in given.items()} | extra
    done = subprocess.run(shell, env=os.environ | environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_ranks_under_mpirun_are_told_the_same(tmp_path):
    rank = run_rank_shell(SERVICE, {}, tmp_path)
    own = environments(SERVICE, per_host=2)[3]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NCCL_HOSTID")
    assert {name: rank[name] for name in names} == {name: own[name] for name in names}
    assert rank["CUDA_MPS_PIPE_DIRECTORY"] == own["CUDA_MPS_PIPE_DIRECTORY"]
    assert run_rank_shell(SERVICE, {"NCCL_HOSTID": "mine"}, tmp_path)["NCCL_HOSTID"] == "mine"
    assert run_rank_shell(None, {}, tmp_path)["LOCAL_RANK"] == "1"


def test_without_the_control_program_ranks_go_on_and_are_told_what_that_costs(tmp_path):
    shared = start_service(tmp_path, "none", which=lambda name: None)
    assert shared.files is None
    assert f"`{CONTROL}` is not on PATH; ranks take turns on the GPU" in shared.complaint
    assert list(tmp_path.iterdir()) == []


def test_stopping_where_nothing_was_started_does_nothing(tmp_path):
    stop_service(tmp_path)
    stop_service(tmp_path / "not there")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def control(tmp_path, monkeypatch):
    """Put a control program on PATH; return how to write it anew, and its log."""
    log, marker = tmp_path / "log", f"3{os.getpid()}{time.monotonic_ns() % 10**6}.25"

    def write(quits='kill $(cat "$CUDA_MPS_PIPE_DIRECTORY/pid")', program=CONTROL_PROGRAM):
        text = program.replace("@LOG@", str(log)).replace("@MARKER@", marker).replace("@QUIT@", quits)
        (tmp_path / CONTROL).write_text(text)
        (tmp_path / CONTROL).chmod(0o755)
        return log, marker

    write()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    return write


def daemons(marker):
    """Return the pretended daemons that live."""
    found = subprocess.run(["ps", "-eo", "stat,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if f"sleep {marker}" in line and not line.startswith("Z")]


def wait_for_one_daemon(marker):
    """Return once the daemon, which the control program leaves behind, has become what it is."""
    for _ in range(100):
        if len(daemons(marker)) == 1:
            return
        time.sleep(0.05)
    assert len(daemons(marker)) == 1


@pytest.mark.root
def test_the_service_runs_beside_the_hosts_and_is_asked_to_end_with_them(control):
    log, marker = control()
    seen = Collected()
    with emulated_cluster(hosts=2, rate="none", gpus="shared") as cluster:
        pipes = str(cluster.files / "mps")
        assert cluster.gpu == SharedGpu(cluster.files)
        wait_for_one_daemon(marker)
        (daemon,) = processes_inside([cluster.layout.switch])
        status = Path(f"/proc/{daemon}/status").read_text()
        assert int(status.split("SigBlk:")[1].split()[0], 16) == 0  # it can be ended, though we held signals back
        assert cluster.run([sys.executable, "-c", SHOW], sink=seen).exit_code == 0
    assert [json.loads(seen.text(rank))["CUDA_MPS_PIPE_DIRECTORY"] for rank in range(2)] == [pipes, pipes]
    assert log.read_text().splitlines() == [f"-d {pipes} unset", f" {pipes} 2", "quit"]  # it serves all GPUs
    assert daemons(marker) == []
    assert not cluster.files.exists()


@pytest.mark.root
def test_a_service_that_does_not_listen_is_killed(control):
    _, marker = control(quits="exit 1")
    with emulated_cluster(hosts=1, rate="none", gpus="shared"):
        wait_for_one_daemon(marker)
    assert daemons(marker) == []


@pytest.mark.root
def test_after_a_crash_of_a_rank_the_service_is_new_for_the_next_run_and_nothing_is_left_at_the_end(control):
    """NVIDIA's takes no clients for a while after one of them was killed."""
    log, marker = control()
    engines = ["gloo"]
    try:
        find_mpirun(run_command)
        engines.append("mpi")
    except ClusterError:
        pass
    with emulated_cluster(hosts=2, rate="none", gpus="shared") as cluster:
        for engine in engines:
            script = "[ $RANK = 1 ] && kill -9 $$; sleep 60"
            outcome = cluster.run(["sh", "-c", script], engine=engine, sink=Collected(), grace_seconds=0.1)
            assert outcome.exit_code == 137
            wait_for_one_daemon(marker)
        words = [line.split()[0] for line in log.read_text().splitlines()]
        assert [word for word in words if word in ("-d", "quit")] == ["-d", *("quit", "-d") * len(engines)]
    assert daemons(marker) == []


@pytest.mark.root
def test_a_service_that_refuses_is_quoted_and_the_ranks_run(control, tmp_path):
    (tmp_path / CONTROL).write_text("#!/bin/sh\necho noise; echo An instance is already running. >&2; exit 1\n")
    run = [sys.executable, "-m", "penstock", "cluster", "run", "--hosts", "2", "--rate", "none", "--gpus", "shared"]
    done = subprocess.run([*run, "--", "sh", "-c", "echo $NCCL_HOSTID"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert len(set(done.stdout.splitlines())) == 2
    assert done.stderr == (
        f"penstock: CUDA's multi-process service does not run: `{CONTROL} -d` says: An instance is already running.; "
        "ranks take turns on the GPU, and messages wait for turns\n"
    )


@pytest.mark.root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_service_goes_with_a_launcher_that_is_stopped_at_once_or_at_the_next_clean(control, number):
    _, marker = control()
    penstock = [sys.executable, "-m", "penstock", "cluster"]
    run = [*penstock, "run", "--hosts", "2", "--gpus", "shared", "--", "sh", "-c", "echo up; sleep 300"]
    launcher = subprocess.Popen(run, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    launcher.stdout.readline()
    wait_for_one_daemon(marker)
    launcher.send_signal(number)
    launcher.wait(120)
    if number == signal.SIGKILL:
        subprocess.run([*penstock, "clean"], check=True, stdout=subprocess.DEVNULL)
        give_up = time.monotonic() + 30
        while daemons(marker) and time.monotonic() < give_up:  # another test's run may be cleaning at this moment
            time.sleep(0.05)
    assert daemons(marker) == []


@pytest.mark.root
def test_two_ranks_on_a_host_that_share_a_gpu_are_still_seen_to_share_the_host():
    code = "import os; from penstock.runtime.hosts import this_host; print(this_host(), os.environ['NCCL_HOSTID'])"
    seen = Collected()
    with emulated_cluster(hosts=2, rate="1gbit", gpus="shared") as cluster:
        assert cluster.run([sys.executable, "-c", code], per_host=2, sink=seen).exit_code == 0
    hosts, ids = zip(*(seen.text(rank).split() for rank in range(4)), strict=True)
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
    assert len(set(ids)) == 4
