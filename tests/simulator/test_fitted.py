"""Lines fitted to simulated programs: against closed forms where there are some, and beyond what can be timed."""

import doctest
from dataclasses import replace

import pytest

from penstock.cost.ways import way_for, ways_for
from penstock.curves import CodecCurves, Curve
from penstock.errors import NetworkError
from penstock.network import Network
from penstock.plan import Route
from penstock.planners import PLANNERS
from penstock.simulator import fitted
from penstock.simulator.fitted import fitted_cost
from penstock.simulator.iteration import predict
from penstock.strategies import STRATEGIES, Options, coded_names, names, sparse_names
from penstock.traces import load_shipped

ONEBIT = CodecCurves(1 / 32, Curve(1e-10, 5e-6), Curve(5e-11, 5e-6), fixed_nbytes=16)
SPARSE = CodecCurves(0.004, Curve(1e-9, 5e-6), Curve(1e-11, 5e-6), fixed_nbytes=8, block_merge=Curve(1e-11, 1e-5))
NETWORK = Network(16, 5e-5, 1e-9, 1e-10, codecs={"onebit": ONEBIT, "sparse(density=0.001)": SPARSE})
FREE_SUMS = replace(NETWORK, gamma_seconds_per_byte=0.0)  # blocks hide sums, which closed forms do not know
NBYTES = 16e6


def test_examples_in_the_docstrings_hold():
    assert doctest.testmod(fitted).failed == 0


CLOSED = [one.name for one in STRATEGIES.values() if one.costs and one.hands_to is None]


@pytest.mark.parametrize("workers", [4, 8])
@pytest.mark.parametrize("name", CLOSED)
def test_a_closed_form_is_the_line_of_the_simulated_program(name, workers):
    closed = STRATEGIES[name].cost(FREE_SUMS, workers, Options()).seconds(NBYTES)
    line = fitted_cost(FREE_SUMS, Route(name), workers).line
    assert line.seconds(NBYTES) == pytest.approx(closed, rel=0.13)


@pytest.mark.parametrize("ranks_per_node", [2, 4])
@pytest.mark.parametrize("outer", [name for name in CLOSED if name not in ("linear_pipeline", "double_tree")])  # blocks
def test_two_levels_cost_what_the_simulator_says_of_both(outer, ranks_per_node):
    route = Route(f"hierarchical(ranks_per_node={ranks_per_node}, outer={outer})")
    closed = way_for(FREE_SUMS, route, 16).seconds(NBYTES)
    assert fitted_cost(FREE_SUMS, route, 16).line.seconds(NBYTES) == pytest.approx(closed, rel=0.05)


@pytest.mark.parametrize("name", ["gtopk", "gtopk_doubling", "topk_allgather"])
def test_a_sparse_line_is_the_closed_form(name):
    route = Route(name, "sparse(density=0.001)")
    cost, closed = fitted_cost(FREE_SUMS, route, 8), way_for(FREE_SUMS, route, 8)
    found = cost.line.seconds(NBYTES) + cost.seconds_per_tensor
    assert found == pytest.approx(closed.seconds(NBYTES), rel=0.05)


def test_world_sizes_too_large_to_be_timed_continue_those_that_can_be(monkeypatch):
    """A tree's time grows with log2 p and a ring's startup with p: known from the closed forms."""
    monkeypatch.setattr(fitted, "MOST_INSTRUCTIONS", 2000)
    fitted._numbers.cache_clear()
    slow = replace(FREE_SUMS, alpha_seconds=1e-3)
    for name in ("binary_tree", "ring"):
        closed = STRATEGIES[name].cost(slow, 2048, Options()).seconds(NBYTES)
        assert fitted_cost(slow, Route(name), 2048).line.seconds(NBYTES) == pytest.approx(closed, rel=0.1)


def test_what_was_fitted_once_is_kept_for_the_network_and_the_world_size():
    fitted._numbers.cache_clear()
    for _ in range(3):
        fitted_cost(NETWORK, Route("double_tree", "onebit"), 8)
    assert fitted._numbers.cache_info().misses == 1


@pytest.mark.parametrize("workers", [2, 7, pytest.param(2048, marks=pytest.mark.slow)])
def test_every_strategy_and_every_codec_is_planned_at_any_world_size(workers):
    dense = [name for name in names("all_reduce") if name != "native"]
    routes = [*dense, *(f"{name}+onebit" for name in coded_names())]
    routes += [f"{name}+sparse(density=0.001)" for name in (*sparse_names(), "hierarchical(outer=gtopk)")]
    ways = [way_for(NETWORK, route, workers, fitted_cost) for route in routes]
    assert all(way.seconds(NBYTES) > 0 for way in ways)


def test_joint_chooses_among_ways_of_all_kinds():
    trace = load_shipped("resnet50")
    ways = ways_for(NETWORK, ["ring", "double_tree", "hierarchical"], ["onebit"], workers=16, estimate=fitted_cost)
    assert {way.source for way in ways} == {"closed form", "simulated"}
    plan = predict(trace, PLANNERS["joint"], ways, 16)
    least = min(predict(trace, PLANNERS["exact"], [way], 16).iteration_seconds for way in ways)
    assert plan.iteration_seconds <= least * (1 + 1e-9)


def test_without_an_estimate_a_route_without_a_closed_form_is_refused():
    with pytest.raises(NetworkError, match="no closed form of a compressed double_tree"):
        way_for(NETWORK, "double_tree+onebit")
    with pytest.raises(NetworkError, match="no all-reduce called 'native'"):
        way_for(NETWORK, "native", 8, fitted_cost)
