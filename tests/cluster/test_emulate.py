"""The whole of it, on real namespaces: environment, exit codes, output, isolation, cleaning up."""

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.cluster import emulated_cluster
from penstock.cluster.building import this_kernel
from penstock.cluster.processes import Collected
from penstock.cluster.slots import processes_inside
from penstock.cluster.topology import slot_of
from penstock.errors import ClusterError

pytestmark = pytest.mark.root
SHOW = "import json, os, socket; print(json.dumps(dict(os.environ) | {'HOST': socket.gethostname()}))"


def namespaces_of(slot):
    return [name for name in this_kernel().namespaces() if slot_of(name) == slot]


def made_when(slot):
    """Return a slot's namespaces with the times they were made: another test may take a slot as soon as it is free."""
    found = set()
    for name in namespaces_of(slot):
        with suppress(FileNotFoundError):  # just removed
            found.add((name, Path("/run/netns", name).stat().st_ctime_ns))
    return found


def is_alive(process):
    """Tell whether a process runs; one that has ended and waits for its parent to look does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True).stdout
    return state.strip() != "" and not state.startswith("Z")


def test_every_worker_gets_the_environment_torchrun_would_give_it():
    seen = Collected()
    with emulated_cluster(hosts=2, rate="none") as cluster:
        assert cluster.run([sys.executable, "-c", SHOW], per_host=2, sink=seen).exit_code == 0
    workers = [json.loads(seen.text(rank)) for rank in range(4)]
    assert [worker["RANK"] for worker in workers] == ["0", "1", "2", "3"]
    assert [worker["LOCAL_RANK"] for worker in workers] == ["0", "1", "0", "1"]
    assert [worker["GROUP_RANK"] for worker in workers] == ["0", "0", "1", "1"]
    assert {(worker["WORLD_SIZE"], worker["LOCAL_WORLD_SIZE"]) for worker in workers} == {("4", "2")}
    assert {worker["MASTER_ADDR"] for worker in workers} == {cluster.layout.hosts[0].address}
    assert [worker["HOST"] for worker in workers] == [host.namespace for host in cluster.layout.hosts for _ in "ab"]


def test_hosts_reach_one_another_by_name():
    code = (
        "import os, socket\n"
        "if os.environ['RANK'] == '0':\n"
        "    print(socket.create_server(('', 5000)).accept()[1][0])\n"
        "else:\n"
        "    name = socket.gethostname().replace('host1', 'host0')\n"
        "    for _ in range(2000):\n"
        "        try:\n"
        "            socket.create_connection((name, 5000)); break\n"
        "        except ConnectionRefusedError:\n"
        "            import time; time.sleep(0.05)\n"
    )
    seen = Collected()
    with emulated_cluster(hosts=2, rate="1gbit") as cluster:
        assert cluster.run([sys.executable, "-c", code], sink=seen).exit_code == 0
    assert seen.text(0).strip() == cluster.layout.hosts[1].address


def test_the_first_failing_worker_gives_the_exit_code_and_the_others_end_after_the_grace():
    started = time.monotonic()
    with emulated_cluster(hosts=3, rate="none") as cluster:
        script = 'case $RANK in 1) exit 7;; 0) trap "" TERM; sleep 300; exit 8;; *) sleep 300;; esac'
        outcome = cluster.run(["sh", "-c", script], grace_seconds=0.2)
    assert (outcome.exit_code, outcome.failed_rank) == (7, 1)
    assert time.monotonic() - started < 200


def test_a_run_past_its_time_is_ended():
    with (
        emulated_cluster(hosts=2, rate="none") as cluster,
        pytest.raises(ClusterError, match=r"ranks \[0, 1\] still ran after 0.2 s"),
    ):
        cluster.run(["sleep", "60"], timeout_seconds=0.2)


def test_two_clusters_at_once_do_not_see_each_other():
    with emulated_cluster(hosts=2, rate="none") as one, emulated_cluster(hosts=2, rate="none") as other:
        assert one.layout.slot != other.layout.slot
        assert not set(one.layout.namespaces) & set(other.layout.namespaces)
        target = other.layout.hosts[0].address
        reach = [sys.executable, "-c", f"import socket; socket.socket(type=socket.SOCK_DGRAM).connect(('{target}', 1))"]
        assert one.run(reach, sink=Collected()).exit_code != 0
        assert other.run(reach, sink=Collected()).exit_code == 0


def test_nothing_is_left_after_the_block_not_even_what_workers_started_in_the_background():
    with emulated_cluster(hosts=2, rate="1gbit") as cluster:
        cluster.run(["sh", "-c", "setsid sleep 300 >/dev/null 2>&1 &"])
        background = processes_inside(cluster.layout.namespaces)
        made = made_when(cluster.layout.slot)
    assert len(background) == 2
    assert len(made) == 3  # two hosts and the switch
    assert not made & made_when(cluster.layout.slot)
    assert not cluster.files.exists()
    assert not [process for process in background if is_alive(process)]


def fail_inside():
    """Raise in the block of a cluster, with what there was of it."""
    with emulated_cluster(hosts=1, rate="none") as cluster:
        raise ZeroDivisionError(cluster.layout.slot, made_when(cluster.layout.slot))


def test_an_exception_in_the_block_cleans_up_too():
    with pytest.raises(ZeroDivisionError) as raised:
        fail_inside()
    slot, made = raised.value.args
    assert made
    assert not made & made_when(slot)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_to_the_launcher_cleans_up(number, code):
    run = [sys.executable, "-m", "penstock", "cluster", "run", "--hosts", "2", "--", "sh", "-c"]
    launcher = subprocess.Popen(
        [*run, "echo $PENSTOCK_CLUSTER_SLOT; sleep 300"],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # nohup and `&` have it ignored, and so inherited
    )
    assert launcher.stdout is not None
    slot = int(launcher.stdout.readline().split()[1])
    made = made_when(slot)
    assert made
    launcher.send_signal(number)
    assert launcher.wait(200) == code
    assert not made & made_when(slot)
