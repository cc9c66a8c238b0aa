from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.building import (
    FRAME_NBYTES,
    GiveAddress,
    LimitRate,
    NewBridge,
    NewCable,
    NewNamespace,
    Plug,
    packet_nbytes,
    setup_steps,
    smooth_bucket,
)
from penstock.cluster.topology import plan_layout

GIGABIT = 10**9


@dataclass
class Wiring:
    """A toy kernel: reads the steps and remembers who is plugged where, and what is limited."""

    namespaces: list[str] = field(default_factory=list)
    switches: list[tuple[str, str]] = field(default_factory=list)
    peers: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)  # interface -> other end of its cable
    bridges: dict[tuple[str, str], str] = field(default_factory=dict)  # interface -> bridge it hangs on
    addresses: dict[str, str] = field(default_factory=dict)
    rates: dict[tuple[str, str], int] = field(default_factory=dict)

    def take(self, step):
        match step:
            case NewNamespace(name):
                self.namespaces.append(name)
            case NewBridge(namespace, name):
                assert namespace in self.namespaces
                self.switches.append((namespace, name))
            case NewCable(namespace, name, bridge, peer_namespace, peer):
                assert {namespace, peer_namespace} <= set(self.namespaces)
                assert max(len(name), len(peer)) <= 15
                near, far = (namespace, name), (peer_namespace, peer)
                self.peers[near], self.peers[far] = far, near
                self.plug(near, bridge)
            case Plug(namespace, name, bridge):
                self.plug((namespace, name), bridge)
            case GiveAddress(namespace, _, address):
                self.addresses[namespace] = address
            case LimitRate(namespace, name, bucket):
                assert (namespace, name) in self.peers, f"{name} does not exist yet"
                self.rates[namespace, name] = bucket.bits_per_second

    def plug(self, end, bridge):
        assert end in self.peers
        assert (end[0], bridge) in self.switches
        self.bridges[end] = bridge


def build(layout):
    wiring = Wiring()
    for step in setup_steps(layout):
        wiring.take(step)
    return wiring


@given(st.integers(1, 40), st.data())
def test_every_host_hangs_on_its_racks_switch_by_a_cable_limited_at_both_ends(hosts, data):
    layout = plan_layout(7, (GIGABIT,) * hosts, data.draw(st.integers(1, hosts)), GIGABIT)
    wiring = build(layout)
    for host in layout.hosts:
        far = wiring.peers[host.namespace, "eth0"]
        assert far == (layout.switch, host.port)
        assert wiring.bridges[far] == f"rack{host.rack}"
        assert wiring.addresses[host.namespace] == host.address
        assert wiring.rates[host.namespace, "eth0"] == wiring.rates[far] == GIGABIT


def test_one_rack_needs_no_core():
    assert set(build(plan_layout(0, (None,) * 4)).bridges.values()) == {"rack0"}


@pytest.mark.parametrize("racks", [2, 3])
def test_an_uplink_joins_each_rack_to_the_core_and_is_limited_both_ways(racks):
    layout = plan_layout(0, (None,) * 6, racks, 10**8)
    wiring = build(layout)
    for rack in range(racks):
        up, down = (layout.switch, f"up{rack}"), (layout.switch, f"down{rack}")
        assert wiring.peers[up] == down
        assert (wiring.bridges[up], wiring.bridges[down]) == (f"rack{rack}", "core")
        assert wiring.rates[up] == wiring.rates[down] == 10**8
    assert len(wiring.rates) == 2 * racks


def test_an_unshaped_host_has_no_bucket():
    wiring = build(plan_layout(0, (GIGABIT, None)))
    assert set(wiring.rates) == {("penstock-0-host0", "eth0"), ("penstock-0-switch", "port0")}


@given(st.integers(10**5, 10**11))
def test_both_buckets_hold_a_frame_and_credit_is_at_most_two_milliseconds(bits_per_second):
    bucket = smooth_bucket(bits_per_second)
    assert FRAME_NBYTES <= bucket.peak_nbytes <= bucket.credit_nbytes
    assert bucket.credit_nbytes - FRAME_NBYTES <= bits_per_second / 8 * 2e-3 + 1
    assert bucket.queue_nbytes > bucket.credit_nbytes
    assert bucket.peak_bits_per_second > bits_per_second


@given(st.integers(10**6, 10**10))
def test_the_largest_packet_of_tcp_fits_the_small_bucket(bits_per_second):
    small = smooth_bucket(bits_per_second).peak_nbytes
    kernel_keeps, payload = 320, 8948  # for headers; of a frame
    frames = max(1, (packet_nbytes(bits_per_second) - kernel_keeps) // payload)
    assert frames * FRAME_NBYTES <= max(small, FRAME_NBYTES)
    assert frames == min(small // FRAME_NBYTES, 7)  # and it is as large as fits, up to 64 KB
