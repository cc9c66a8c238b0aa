"""What listens on a machine while its workers train: nothing that another machine could reach."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
from penstock.cluster.processes import free_port

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
