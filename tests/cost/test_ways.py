import pytest

from penstock.cost.ways import way_for
from penstock.errors import NetworkError
from penstock.network import LinearCost, Network

NETWORK = Network(4, 1.0, 2.0, 3.0, {"ring": LinearCost(10.0, 20.0), "nccl": LinearCost(1.0, 2.0)})


def test_a_measured_line_holds_for_the_world_it_was_measured_in():
    assert way_for(NETWORK, "ring").stages == (LinearCost(10.0, 20.0),)
    assert way_for(NETWORK, "ring").measured
    assert not way_for(NETWORK, "ring", 8).measured
    assert way_for(NETWORK, "ring", 8).stages[0].a_seconds == 14.0


def test_parameter_servers_have_two_stages():
    way = way_for(NETWORK, "parameter-server", 2)
    assert (way.strategy, way.lanes, len(way.stages)) == ("parameter_server", ("push", "pull"), 2)
    assert way.whole == way.stages[0] + way.stages[1]


def test_unknown_names_say_what_is_known():
    with pytest.raises(
        NetworkError, match="no all-reduce called 'rong'; measured in network 'network': ring, nccl; closed"
    ):
        way_for(NETWORK, "rong")
    with pytest.raises(NetworkError, match="measured 'nccl' with 4 workers, and it has no closed form for 8"):
        way_for(NETWORK, "nccl", 8)
    with pytest.raises(NetworkError, match="0 workers; wanted at least 1"):
        way_for(NETWORK, "ring", 0)
