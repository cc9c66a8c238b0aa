import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.layout import MAX_HOSTS, SLOTS, plan_layout, slot_of
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
