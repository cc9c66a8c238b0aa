import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.topology import (
    MAX_HOSTS,
    SLOTS,
    parse_delay,
    parse_rate,
    parse_rates,
    plan_layout,
    slot_of,
)
from penstock.errors import ClusterError

slots = st.integers(0, SLOTS - 1)
host_counts = st.integers(1, MAX_HOSTS)


@given(slots, host_counts)
def test_addresses_are_distinct_and_in_the_benchmark_range(slot, count):
    addresses = {ipaddress.ip_address(host.address) for host in plan_layout(slot, (None,) * count).hosts}
    assert len(addresses) == count
    assert all(address in ipaddress.ip_network("198.18.0.0/15") for address in addresses)


@given(slots, slots, host_counts)
def test_two_slots_share_neither_names_nor_subnets(one, other, count):
    first, second = (plan_layout(slot, (None,) * count) for slot in (one, other))
    subnets = [{ipaddress.ip_network(f"{host.address}/24", strict=False) for host in x.hosts} for x in (first, second)]
    assert (set(first.namespaces) & set(second.namespaces) == set()) == (one != other)
    assert (subnets[0] & subnets[1] == set()) == (one != other)
    assert len(subnets[0]) == 1


@given(slots, host_counts)
def test_a_namespace_tells_its_slot(slot, count):
    layout = plan_layout(slot, (None,) * count)
    assert {slot_of(name) for name in layout.namespaces} == {slot}


@pytest.mark.parametrize("name", ["h0", "penstock", "penstock-x-host0", "penstock-1-host", "my-penstock-1-host0"])
def test_names_of_others_have_no_slot(name):
    assert slot_of(name) is None


@given(host_counts, st.data())
def test_racks_hold_consecutive_hosts_and_differ_by_at_most_one(count, data):
    racks = data.draw(st.integers(1, count))
    placed = [host.rack for host in plan_layout(0, (None,) * count, racks).hosts]
    sizes = [placed.count(rack) for rack in range(racks)]
    assert placed == sorted(placed)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("count", [0, MAX_HOSTS + 1])
def test_host_counts_out_of_range_are_refused(count):
    with pytest.raises(ClusterError, match=f"{count} hosts: wanted 1 to {MAX_HOSTS}"):
        plan_layout(0, (None,) * count)


def test_more_racks_than_hosts_are_refused():
    with pytest.raises(ClusterError, match="3 racks for 2 hosts: wanted 1 to 2"):
        plan_layout(0, (None, None), racks=3)


@pytest.mark.parametrize(
    ("text", "bits_per_second"),
    [("1gbit", 10**9), ("100mbit", 10**8), ("2.5Gbit", 2_500_000_000), ("512 kbit", 512_000), ("none", None)],
)
def test_rates_are_read_as_tc_writes_them(text, bits_per_second):
    assert parse_rate(text) == bits_per_second


@pytest.mark.parametrize("text", ["", "fast", "1", "1gb", "-1gbit", "1gbit/s", "nan", "1e3mbit"])
def test_a_rate_without_a_known_unit_is_refused(text):
    with pytest.raises(ClusterError, match="wanted a number and one of bit, kbit, mbit, gbit"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["0gbit", "10bit", "500gbit"])
def test_a_rate_out_of_range_is_refused(text):
    with pytest.raises(ClusterError, match="wanted 100kbit to 100gbit, or none"):
        parse_rate(text)


def test_one_rate_holds_for_every_host():
    assert parse_rates("1gbit", 3) == (10**9,) * 3


def test_each_host_may_have_its_own_rate():
    assert parse_rates("1gbit,none,100mbit", 3) == (10**9, None, 10**8)


def test_a_list_of_the_wrong_length_is_refused():
    with pytest.raises(ClusterError, match="names 2 hosts of 3; give one rate, or one per host"):
        parse_rates("1gbit,1gbit", 3)


@pytest.mark.parametrize(("text", "seconds"), [("5ms", 5e-3), ("200us", 2e-4), ("1.5s", 1.5), ("0ms", 0.0)])
def test_delays_are_read_in_seconds(text, seconds):
    assert parse_delay(text) == pytest.approx(seconds)


def test_a_delay_without_a_unit_is_refused():
    with pytest.raises(ClusterError, match="latency '5': wanted a number and one of us, ms, s, as in 5ms"):
        parse_delay("5")
