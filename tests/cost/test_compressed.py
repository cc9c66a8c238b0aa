import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cost.papers import sync_seconds
from penstock.cost.ways import way_for, ways_for
from penstock.curves import CodecCurves, Curve
from penstock.errors import NetworkError
from penstock.network import LinearCost, Network
from penstock.strategies import parameter_server, ring

ONEBIT = CodecCurves(1 / 32, Curve(0.2, 5.0), Curve(0.1, 3.0), Curve(0.15, 3.0), fixed_nbytes=32)
NETWORK = Network(4, 7.0, 2.0, 0.5, codecs={"onebit": ONEBIT})
SEND = Curve(2.0, 7.0)


@given(st.integers(2, 17), st.integers(1, 20), st.integers(0, 10_000))
def test_a_bucket_of_one_tensor_costs_what_equation_2_says(workers, k, nbytes):
    pieces = workers if k == 1 else k  # 1: as the strategy cuts it, one piece per rank
    for name, counts in (("parameter_server", parameter_server.counts), ("ring", ring.counts)):
        way = way_for(NETWORK, f"{name}+onebit/{k}", workers)
        assert way.seconds(nbytes) == pytest.approx(sync_seconds(counts, workers, pieces, nbytes, SEND, ONEBIT))


def test_every_tensor_of_a_bucket_brings_its_own_calls_and_headers():
    """A ring of 4 ranks cuts each tensor into 4 pieces: 4 encodes, 4 decodes and 6 sends of a header one by one."""
    way = way_for(NETWORK, "ring+onebit")
    headers = 6 * 2.0 * 32
    assert way.seconds(1000, 3) - way.seconds(1000, 2) == pytest.approx(4 * 5.0 + 4 * 3.0 + headers)
    assert way_for(NETWORK, "ring").seconds(1000, 3) == way_for(NETWORK, "ring").seconds(1000, 1)


def test_a_tree_encodes_on_every_level_up_and_once_down():
    way = way_for(NETWORK, "binary_tree+onebit", 4)
    assert way.seconds(320) == pytest.approx(4 * (7 + 2 * (32 + 10)) + 3 * (5 + 0.2 * 320) + 3 * (3 + 0.1 * 320))


def test_an_all_gather_encodes_once_and_decodes_everybodys():
    way = way_for(NETWORK, "all_gather+onebit", 4)
    assert way.seconds(320) == pytest.approx(3 * (7 + 2 * (32 + 10)) + (5 + 0.2 * 320) + 4 * (3 + 0.1 * 320))


def test_one_worker_compresses_nothing():
    assert way_for(NETWORK, "ring+onebit", 1).seconds(1000) == 0.0


def test_a_measured_line_is_of_one_tensor():
    measured = Network(4, 7.0, 2.0, 0.5, {"ring+onebit": LinearCost(5000.0, 0.3)}, {"onebit": ONEBIT})
    way = way_for(measured, "ring+onebit")
    assert way.measured
    assert way.seconds(100) == pytest.approx(5000 + 30)
    assert way.seconds(100, 2) - way.seconds(100) == pytest.approx(way_for(NETWORK, "ring+onebit").seconds_per_tensor)
    assert not way_for(measured, "ring+onebit", 8).measured


def test_what_further_tensors_add_may_be_measured_too():
    measured = Network(4, 7.0, 2.0, 0.5, {"ring+onebit": LinearCost(500.0, 0.3, 25.0)}, {"onebit": ONEBIT})
    way = way_for(measured, "ring+onebit")
    assert way.seconds(100) == pytest.approx(500 + 30)
    assert way.seconds(100, 3) == pytest.approx(500 + 30 + 2 * 25)


def test_further_tensors_that_were_measured_to_add_nothing_add_nothing():
    measured = Network(4, 7.0, 2.0, 0.5, {"ring+onebit": LinearCost(500.0, 0.3, 0.0)}, {"onebit": ONEBIT})
    way = way_for(measured, "ring+onebit")
    assert way.seconds(100, 3) == way.seconds(100) == pytest.approx(500 + 30)


def test_all_combinations_that_can_be_costed_are_ways():
    ways = ways_for(NETWORK, ["ring", "double_tree"], ["onebit"], [1, 2])
    assert [str(way.route) for way in ways] == ["ring", "double_tree", "ring+onebit", "ring+onebit/2"]


def test_what_was_not_measured_says_how_to_measure_it():
    with pytest.raises(NetworkError, match="no curves of codec 'dgc'; it has: onebit; measure them with `penstock mea"):
        way_for(NETWORK, "ring+dgc")
    with pytest.raises(NetworkError, match="no closed form of a compressed double_tree; wanted one of ring, rec"):
        way_for(NETWORK, "double_tree+onebit")


def test_beside_a_measured_line_no_closed_form_of_the_same_kind_is_considered():
    lines = {"ring+onebit": LinearCost(500.0, 0.3), "ring+onebit/4": LinearCost(600.0, 0.2)}
    measured = Network(4, 7.0, 2.0, 0.5, lines, {"onebit": ONEBIT, "fp16": ONEBIT})
    ways = ways_for(measured, ["ring"], ["onebit", "fp16"], [1, 2, 4])
    wanted = ["ring+onebit", "ring+onebit/4", "ring+fp16", "ring+fp16/2", "ring+fp16/4"]
    assert [str(way.route) for way in ways[1:]] == wanted
    assert len(ways_for(measured, ["ring"], ["onebit"], [1, 2, 4], workers=8)) == 4
