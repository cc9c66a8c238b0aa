"""Whatever is killed and whenever: after the next clean no namespace, interface, process or file of the run is left."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.cluster.building import run_command, this_kernel
from penstock.cluster.slots import STATE_DIRECTORY, try_lock
from penstock.cluster.topology import slot_of
from penstock.cluster.worker_commands import find_mpirun
from penstock.errors import ClusterError

pytestmark = pytest.mark.root
VICTIMS = ("SIGKILL", "SIGTERM", "SIGINT", "worker")
LATEST_KILL_SECONDS = 0.8  # the hosts stand after about 0.3 s: some are killed while they are being built
PENSTOCK = [sys.executable, "-m", "penstock", "cluster"]


def engines():
    try:
        find_mpirun(run_command)
    except ClusterError:
        return ("gloo",)
    return ("gloo", "gloo", "mpi")


def processes_with(marker):
    """Return the living processes whose command line holds `marker`."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker.encode() in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
    return found - {os.getpid()}


def abandoned_namespaces():
    """Return the namespaces of runs that are not alive; others may be using this machine too."""
    abandoned = []
    for name in this_kernel().namespaces():
        slot = slot_of(name)
        if slot is not None and (held := try_lock(slot, STATE_DIRECTORY)) is not None:
            if name in this_kernel().namespaces():  # not one that a live run has just removed itself
                abandoned.append(name)
            held.release()
    return abandoned


def abandoned_files():
    """Return the directories of runs that are not alive."""
    return [path for path in STATE_DIRECTORY.glob("files-*") if not path.with_name(f"cluster-{path.name[6:]}").exists()]


def when_made(namespace):
    """Return when a namespace was made, None where there is none: a later run may give another the same name."""
    try:
        return Path("/run/netns", namespace).stat().st_ctime_ns
    except FileNotFoundError:
        return None


def soon(found):
    """Return what `found` returns once that is nothing, or after half a minute.

    Another test that starts a run may be cleaning at this moment, with the lock in its hands.
    """
    give_up = time.monotonic() + 30
    while (left := found()) and time.monotonic() < give_up:
        time.sleep(0.05)
    return left


def interfaces():
    """Return the names of the interfaces of the machine itself."""
    return {name for _, name in socket.if_nameindex()}


def run_and_kill(rng, victim):
    """Start a run, kill someone at a random moment, wait for the launcher; return what could tell its processes."""
    marker = f"3{rng.randrange(10**8):08d}.5"  # seconds to sleep: unlike any other on this machine
    script = f"setsid sleep {marker} & sleep {marker}"
    options = ["--hosts", str(rng.randint(1, 3)), "--engine", rng.choice(engines()), "--grace", "0.1"]
    launcher = subprocess.Popen(
        [*PENSTOCK, "run", *options, "--", "sh", "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    time.sleep(rng.uniform(0, LATEST_KILL_SECONDS))
    if victim == "worker":
        while not (workers := processes_with(marker) - {launcher.pid}):
            assert launcher.poll() is None, "the launcher ended before it started a worker"
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice(sorted(workers)), signal.SIGKILL)
        time.sleep(0.3)
        launcher.terminate()  # a background process may have been hit, which nobody waits for
    else:
        launcher.send_signal(signal.Signals[victim])
    launcher.wait(120)
    return marker


def assert_nothing_is_left(rounds, seed):
    rng = random.Random(seed)
    before = interfaces()
    for index in range(rounds):
        victim = VICTIMS[index % len(VICTIMS)]
        marker = run_and_kill(rng, victim)
        subprocess.run([*PENSTOCK, "clean"], check=True, stdout=subprocess.DEVNULL)
        assert soon(lambda m=marker: processes_with(m)) == set(), f"round {index}, {victim}"
        assert soon(abandoned_namespaces) == [], f"round {index}, {victim}"
    assert interfaces() == before
    assert soon(abandoned_files) == []


def test_four_random_kills_leave_nothing_behind():
    assert_nothing_is_left(4, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fifty_random_kills_leave_nothing_behind():
    assert_nothing_is_left(50, seed=2)


def test_a_killed_launcher_takes_its_workers_along_and_the_next_run_removes_the_rest():
    script = "echo $PENSTOCK_CLUSTER_SLOT; setsid sleep 3000.25 & sleep 3000.25"
    launcher = subprocess.Popen([*PENSTOCK, "run", "--hosts", "1", "--", "sh", "-c", script], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    slot = int(launcher.stdout.readline())
    made = when_made(f"penstock-{slot}-host0")
    launcher.kill()
    launcher.wait()
    subprocess.run([*PENSTOCK, "run", "--hosts", "1", "--", "true"], check=True)
    assert soon(lambda: processes_with("3000.25")) == set()
    assert soon(abandoned_namespaces) == []
    assert made is not None
    assert when_made(f"penstock-{slot}-host0") != made  # gone, or a later run's


def test_clean_does_not_touch_a_live_run(tmp_path):
    script = f"echo up; until [ -e {tmp_path}/cleaned ]; do sleep 0.1; done; echo done"
    live = subprocess.Popen(
        [*PENSTOCK, "run", "--hosts", "1", "--", "sh", "-c", script],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert live.stdout is not None
    assert live.stdout.readline() == "up\n"
    subprocess.run([*PENSTOCK, "clean"], check=True, stdout=subprocess.DEVNULL)
    (tmp_path / "cleaned").touch()
    assert live.stdout.read() == "done\n"
    assert live.wait() == 0
