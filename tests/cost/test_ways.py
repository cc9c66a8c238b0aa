import pytest

from penstock.cost.clusters import CLUSTERS
from penstock.cost.ways import way_for, ways_for
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


def test_a_strategy_that_carries_nothing_dense_takes_a_codec_of_the_networks():
    network = CLUSTERS["gtop-k-1gbe"]
    assert str(way_for(network, "gtopk").route) == "gtopk+sparse"
    assert [str(way.route) for way in ways_for(network, ["topk_allgather"])] == ["topk_allgather+sparse"]
    with pytest.raises(NetworkError, match="gtopk carries only blocks of a sparse codec, and network"):
        way_for(CLUSTERS["hipress-100gbps"], "gtopk")
    with pytest.raises(NetworkError, match="gtopk cannot carry onebit; wanted sparse"):
        ways_for(CLUSTERS["hipress-100gbps"], ["gtopk"], ["onebit"])


def test_a_codec_whose_curves_are_missing_is_not_called_one_that_cannot_be_carried():
    wanted = (
        r"network 'gtop-k-1gbe' has no curves of codec 'sparse\(density=0.01\)'; it has: sparse; "
        r"measure them with `penstock measure --codecs 'sparse\(density=0.01\)'`"
    )
    with pytest.raises(NetworkError, match=wanted):
        ways_for(CLUSTERS["gtop-k-1gbe"], ["gtopk"], ["sparse(density=0.01)"])


def test_gtop_ks_closed_form_on_its_own_cluster_is_its_equation_7():
    network, nbytes = CLUSTERS["gtop-k-1gbe"], 100e6
    selecting = 1.55e-9 * nbytes
    log, alpha, beta, entries = 5, 0.436e-3, 9e-9, 0.002 * nbytes
    assert way_for(network, "gtopk", 32).seconds(nbytes) == pytest.approx(
        selecting + 2 * log * (alpha + beta * entries)
    )
