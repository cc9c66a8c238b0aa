"""What is built over netlink, on the real kernel and read by iproute2: another reader than the one that wrote it."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading

import pytest

from penstock.bench.jobs import plain_bucket
from penstock.cluster import emulated_cluster
from penstock.cluster.building import (
    Bucket,
    ChooseCongestionControl,
    LimitRate,
    NewBridge,
    NewNamespace,
    packet_nbytes,
    smooth_bucket,
)
from penstock.cluster.netlink import Netlink
from penstock.cluster.processes import Collected
from penstock.cluster.topology import namespace_path, plan_layout
from penstock.errors import ClusterError

pytestmark = pytest.mark.root
needs_iproute2 = pytest.mark.skipif(
    not shutil.which("ip") or not shutil.which("tc"), reason="reads with `ip` and `tc`, which are not on PATH"
)


def read(*words):
    """Return what `ip` or `tc` say as JSON."""
    return json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


@pytest.fixture
def namespace():
    """Return the name of a namespace that is not there, and is removed afterwards if it is."""
    name = f"netlink-test-{os.getpid()}"
    yield name
    with contextlib.suppress(FileNotFoundError):
        Netlink().remove(name)


def queue_of(namespace, interface):
    """Return the queue of an interface in `tc`'s words, without the number that the kernel gave it."""
    words = ["tc", "-n", namespace, "-d", "qdisc", "show", "dev", interface]
    return re.sub(r"tbf \w+:", "tbf", subprocess.run(words, capture_output=True, text=True, check=True).stdout)


@needs_iproute2
@pytest.mark.parametrize("rate", ["100kbit", "1gbit", "10gbit", "50gbit"])
@pytest.mark.parametrize("make", [smooth_bucket, plain_bucket])
def test_buckets_are_those_that_tc_makes_also_beyond_32_bits_of_rate(rate, make):
    with emulated_cluster(hosts=1, rate=rate, bucket=make) as cluster:
        host = cluster.layout.hosts[0]
        bucket = make(host.bits_per_second)
        words = ["rate", f"{bucket.bits_per_second}bit", "burst", bucket.credit_nbytes, "limit", bucket.queue_nbytes]
        if bucket.peak_bits_per_second is not None:
            words += ["peakrate", f"{bucket.peak_bits_per_second}bit", "mtu", bucket.peak_nbytes]
        for where, interface in ((host.namespace, "eth0"), (cluster.layout.switch, host.port)):
            ours = queue_of(where, interface)
            replace = ["tc", "-n", where, "qdisc", "replace", "dev", interface, "root", "tbf", *map(str, words)]
            subprocess.run(replace, check=True)
            assert "rate" in ours
            assert ours == queue_of(where, interface)


@needs_iproute2
def test_a_cable_is_pulled_and_a_rate_changed_while_hosts_are_there():
    with emulated_cluster(hosts=2, rate="1gbit") as cluster:
        host = cluster.layout.hosts[1]
        before = queue_of(host.namespace, "eth0")
        cluster.set_rate(1, smooth_bucket(10**6))
        for where, interface in ((host.namespace, "eth0"), (cluster.layout.switch, host.port)):
            assert "1Mbit" in queue_of(where, interface)
        cluster.set_rate(1, smooth_bucket(10**9))
        assert queue_of(host.namespace, "eth0") == before
        for is_up, wanted in ((False, "NO-CARRIER"), (True, "LOWER_UP")):
            cluster.set_link(1, is_up)
            (link,) = read("ip", "-j", "-n", host.namespace, "link", "show", "dev", "eth0")
            assert wanted in link["flags"]


@needs_iproute2
def test_every_host_has_its_address_large_frames_and_cubic():
    with emulated_cluster(hosts=2, rate="1gbit") as cluster:
        for host in cluster.layout.hosts:
            (address,) = read("ip", "-j", "-4", "-n", host.namespace, "addr", "show", "dev", "eth0")
            assert [(one["local"], one["prefixlen"]) for one in address["addr_info"]] == [(host.address, 24)]
            assert address["mtu"] == 9000
            (link,) = read("ip", "-j", "-d", "-n", host.namespace, "link", "show", "dev", "eth0")
            assert link["gso_max_size"] == packet_nbytes(10**9)
            (route,) = read("ip", "-j", "-n", host.namespace, "route")
            assert (route["dev"], route["prefsrc"]) == ("eth0", host.address)
            assert "cubic" in json.dumps(route)


def test_the_caller_stays_where_it_is_and_keeps_no_descriptor_or_thread():
    network, descriptors = os.stat("/proc/self/ns/net").st_ino, len(os.listdir("/proc/self/fd"))
    with emulated_cluster(hosts=5, rate="1gbit"):
        assert os.stat("/proc/self/ns/net").st_ino == network
        assert [thread.name for thread in threading.enumerate() if "netlink" in thread.name] == []
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 1  # and the lock of the slot
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_hosts_can_be_made_inside_an_event_loop_of_the_callers():
    code = (
        "import asyncio\n"
        "from penstock.cluster import emulated_cluster\n"
        "async def main():\n"
        "    with emulated_cluster(hosts=1, rate='1gbit') as cluster:\n"
        "        print(cluster.run(['true']).exit_code)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_neither_ip_nor_tc_is_called(tmp_path, monkeypatch):
    for tool in ("ip", "tc"):
        (tmp_path / tool).write_text(f"#!/bin/sh\necho {tool} was called >> {tmp_path}/called\nexit 1\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with emulated_cluster(hosts=2, rate="1gbit", uplink="1gbit") as cluster:
        assert cluster.run(["true"], sink=Collected()).exit_code == 0
    assert not (tmp_path / "called").exists()


def test_the_kernels_own_words_are_passed_on(namespace):
    Netlink().build([NewNamespace(namespace)])
    with pytest.raises(ClusterError, match="making a network namespace failed: File exists; needs a kernel with"):
        Netlink().build([NewNamespace(namespace)])
    slower_peak = Bucket(10**9, 10**5, 10**6, 10**8, 10**5)
    with pytest.raises(ClusterError, match=r"limiting a link failed: .*Invalid argument; needs a kernel with"):
        Netlink().build([NewBridge(namespace, "rack0"), LimitRate(namespace, "rack0", slower_peak)])


def test_an_unknown_congestion_control_is_passed_over_and_the_rest_is_built(namespace):
    address = plan_layout(0, (None,)).hosts[0].address
    steps = [
        NewNamespace(namespace),
        NewBridge(namespace, "rack0"),
        ChooseCongestionControl(namespace, "rack0", address, "no-such-algorithm"),
        LimitRate(namespace, "rack0", smooth_bucket(10**9)),
    ]
    Netlink().build(steps)
    assert namespace in Netlink().namespaces()
    Netlink().remove(namespace)
    assert namespace not in Netlink().namespaces()
    assert not namespace_path(namespace).exists()


def test_ranks_of_one_host_do_not_pass_its_limited_nic():
    """At 1 Mb/s these 8 MB would take a minute; the NIC's counter shows that they do not even try."""
    code = (
        "import os, socket\n"
        "from penstock.cluster.processes import sent_nbytes\n"
        "address, data = (os.environ['MASTER_ADDR'], 5000), bytes(8_000_000)\n"
        "before = sent_nbytes('eth0')\n"
        "if os.environ['RANK'] == '0':\n"
        "    connection = socket.create_server(address).accept()[0]\n"
        "    got = 0\n"
        "    while chunk := connection.recv(1 << 20):\n"
        "        got += len(chunk)\n"
        "    assert got == len(data), got\n"
        "else:\n"
        "    for _ in range(2000):\n"
        "        try:\n"
        "            with socket.create_connection(address) as connection:\n"
        "                connection.sendall(data)\n"
        "            break\n"
        "        except ConnectionRefusedError:\n"
        "            import time; time.sleep(0.02)\n"
        "print(sent_nbytes('eth0') - before)\n"
    )
    seen = Collected()
    with emulated_cluster(hosts=1, rate="1mbit") as cluster:
        assert cluster.run([sys.executable, "-c", code], per_host=2, sink=seen).exit_code == 0
    assert all(int(seen.text(rank)) < 10_000 for rank in range(2))
