"""The closed forms against the papers' tables, term by term, and against one another."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cost import papers
from penstock.errors import StrategyError
from penstock.network import Network
from penstock.program import Collective
from penstock.strategies import (
    STRATEGIES,
    Options,
    halving_doubling,
    linear_pipeline,
    parameter_server,
    recursive_doubling,
    ring,
    spanning_tree,
)
from penstock.strategies.closed_form import ceil_log2, floor_log2
from penstock.strategies.linear_pipeline import best_block_nbytes

A, B, C = 3.0, 5.0, 7.0  # alpha, beta, gamma: small primes show which term is wrong
NETWORK = Network(8, A, B, C)


def forms(collective):
    """Return the closed forms of a collective, by strategy."""

    def bound(form):
        return lambda network, p: form(network, p, Options())

    return {one.name: bound(one.costs[collective]) for one in STRATEGIES.values() if collective in one.costs}


ALL_REDUCE, BROADCAST, REDUCE = map(forms, (Collective.ALL_REDUCE, Collective.BROADCAST, Collective.REDUCE))


@pytest.mark.parametrize(
    ("name", "a", "b"),
    [  # MG-WFBP Table 2 with N = 8
        ("binary_tree", 2 * A * 3, (2 * B + C) * 3),
        ("recursive_doubling", A * 3, (B + C) * 3),
        ("halving_doubling", 2 * A * 3, 2 * B - (2 * B + C) / 8 + C),
        ("ring", 2 * 7 * A, 2 * 7 / 8 * B + 7 / 8 * C),
        ("spanning_tree", 2 * A * 3, (2 * B + C) * 3),
        ("bidirectional_exchange", 2 * A * 3, 2 * 7 / 8 * B + 7 / 8 * C),
    ],
)
def test_all_reduce_is_table_2(name, a, b):
    cost = ALL_REDUCE[name](NETWORK, 8)
    assert (cost.a_seconds, cost.b_seconds_per_byte) == pytest.approx((a, b))


def test_double_trees_as_published_are_table_2():
    cost = papers.double_tree(NETWORK, 9)  # their depth rounded up
    assert (cost.a_seconds, cost.b_seconds_per_byte) == pytest.approx((2 * A * 4, B + C))


@pytest.mark.parametrize("n", [0, 1, 100, 12345])
def test_broadcast_and_reduce_are_wangs_table_1(n):
    p, log, b = 8, 3, 16.0
    assert BROADCAST["bidirectional_exchange"](NETWORK, p).seconds(n) == pytest.approx(
        (log + p - 1) * A + 2 * 7 / 8 * n * B
    )
    assert BROADCAST["spanning_tree"](NETWORK, p).seconds(n) == pytest.approx(log * (A + n * B))
    assert REDUCE["bidirectional_exchange"](NETWORK, p).seconds(n) == pytest.approx(
        2 * log * A + 2 * 7 / 8 * n * B + 7 / 8 * n * C
    )
    assert REDUCE["spanning_tree"](NETWORK, p).seconds(n) == pytest.approx(log * (A + n * B + n * C))
    broadcast = (p - 1 + n / b) * A + (b * (p - 1) + n) * B
    assert linear_pipeline.broadcast_cost(NETWORK, p, block_nbytes=b).seconds(n) == pytest.approx(broadcast)
    all_reduce = 2 * (p - 1 + n / b) * A + (b * p - b + n) * (2 * B + C)
    assert linear_pipeline.cost(NETWORK, p, block_nbytes=b).seconds(n) == pytest.approx(all_reduce)


@pytest.mark.parametrize("name", ALL_REDUCE)
def test_one_worker_sends_nothing(name):
    cost = ALL_REDUCE[name](NETWORK, 1)
    assert (cost.a_seconds, cost.b_seconds_per_byte) == (0.0, 0.0)


@pytest.mark.parametrize("name", [*BROADCAST])
def test_one_worker_broadcasts_and_reduces_nothing(name):
    for table in (BROADCAST, REDUCE):
        assert table[name](NETWORK, 1).seconds(1000) == 0.0


def test_a_world_that_is_no_power_of_two_folds_its_extra_ranks():
    extra = recursive_doubling.cost(NETWORK, 4).seconds(10) + 2 * A + (2 * B + C) * 10
    assert recursive_doubling.cost(NETWORK, 6).seconds(10) == pytest.approx(extra)
    extra = halving_doubling.cost(NETWORK, 8).seconds(10) + 2 * A + (2 * B + C) * 10
    assert halving_doubling.cost(NETWORK, 9).seconds(10) == pytest.approx(extra)


def test_a_tree_rounds_its_depth_up():
    assert spanning_tree.broadcast_cost(NETWORK, 5).b_seconds_per_byte == 3 * B


@given(st.integers(1, 5000))
def test_logarithms_of_world_sizes(p):
    assert 2 ** floor_log2(p) <= p < 2 ** (floor_log2(p) + 1)
    assert ceil_log2(p) == math.ceil(math.log2(p))


@given(st.integers(2, 100), st.integers(1, 10**9), st.sampled_from([Collective.BROADCAST, Collective.ALL_REDUCE]))
def test_no_block_beats_the_best_block(p, n, operation):
    network = Network(p, 1e-4, 1e-9, 3e-10)
    cost = STRATEGIES["linear_pipeline"].costs[operation]
    best = best_block_nbytes(network, p, n, operation)
    assert 1 <= best <= n
    for block in (best / 2, best * 0.99, best * 1.01, best * 2):
        if 1 <= block <= n:
            assert cost(network, p, block_nbytes=best).seconds(n) <= cost(network, p, block_nbytes=block).seconds(n) * (
                1 + 1e-12
            )


def test_the_best_block_of_a_broadcast_is_erratum_9s():
    network = Network(4, 1e-4, 1e-9, 0.0)
    assert best_block_nbytes(network, 4, 16e6, Collective.BROADCAST) == pytest.approx(
        math.sqrt(16e6 * 1e-4 / (3 * 1e-9))
    )
    assert best_block_nbytes(network, 1, 16e6, Collective.BROADCAST) == 16e6
    assert best_block_nbytes(Network(4, 0.0, 1e-9, 0.0), 4, 16e6, Collective.BROADCAST) == 1.0


def test_the_linear_pipeline_hardly_grows_with_the_world():
    network = Network(2, 1e-6, 1e-9, 0.0)
    n = 1e8
    times = [
        linear_pipeline.broadcast_cost(
            network, p, block_nbytes=best_block_nbytes(network, p, n, Collective.BROADCAST)
        ).seconds(n)
        for p in (2, 32)
    ]
    assert times[1] / times[0] < 1.1
    assert spanning_tree.broadcast_cost(network, 32).seconds(n) / times[1] > 4.5  # log2(32) = 5 is the limit


def test_push_and_pull_through_colocated_servers_cost_a_ring_in_bytes():
    push, pull = parameter_server.stages(NETWORK, 8).values()
    assert (push + pull).b_seconds_per_byte == pytest.approx(ring.cost(NETWORK, 8).b_seconds_per_byte)
    assert (push + pull).a_seconds == pytest.approx(ring.cost(NETWORK, 8).a_seconds)
    assert parameter_server.stages(NETWORK, 1)["push"].seconds(100) == 0.0


def test_one_dedicated_server_receives_everything_from_everybody():
    push, pull = parameter_server.stages(NETWORK, 9, Options(servers=1, dedicated=True)).values()
    assert push.seconds(10) == pytest.approx(8 * A + 8 * 10 * (B + C))
    assert pull.seconds(10) == pytest.approx(8 * A + 8 * 10 * B)


def test_a_server_that_trains_too_receives_everything_from_all_others():
    push, pull = parameter_server.stages(NETWORK, 9, Options(servers=1)).values()
    assert (push + pull).seconds(10) == pytest.approx(16 * A + 8 * 10 * (2 * B + C))
    assert parameter_server.stages(NETWORK, 9, Options(servers=9)) == parameter_server.stages(NETWORK, 9)
    with pytest.raises(StrategyError, match="99 servers of 9 ranks; wanted at most 9"):
        parameter_server.stages(NETWORK, 9, Options(servers=99))


@pytest.mark.parametrize("name", sorted(ALL_REDUCE))
@pytest.mark.parametrize(("beta", "gamma"), [(1e-9, 2e-10), (8.5e-9, 3.1e-10), (1e-10, 2.5e-9)])
def test_one_worker_sends_nothing_whatever_the_rounding(name, beta, gamma):
    cost = ALL_REDUCE[name](Network(1, 4.5e-5, beta, gamma), 1)
    assert (cost.a_seconds, cost.b_seconds_per_byte) == (0, 0)
