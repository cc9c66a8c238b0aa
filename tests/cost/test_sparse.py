from dataclasses import replace

import pytest

from penstock.cost.clusters import CLUSTERS
from penstock.cost.sparse import (
    SparseCurves,
    dense,
    exchange_cost,
    fastest_variant,
    first_world_size,
    gtop_k,
    selection_cost,
    top_k,
)
from penstock.curves import Curve
from penstock.program import Op
from penstock.simulator.program import CodecCost, simulate_program
from penstock.strategies import build

NETWORK = CLUSTERS["gtop-k-1gbe"]
ALPHA, BETA = 0.436e-3, 9e-9
M = 100e6  # bytes of the dense gradient
K = 0.001 * M / 4  # entries of 4-byte values and 4-byte indices


@pytest.mark.parametrize(("p", "log"), [(2, 1), (4, 2), (32, 5), (5, 3)])
def test_table_1_of_gtop_k(p, log):
    assert dense(NETWORK, p).seconds(M) == pytest.approx(2 * (p - 1) * ALPHA + 2 * (p - 1) / p * M * BETA)
    assert top_k(NETWORK, p, 0.001).seconds(M) == pytest.approx(log * ALPHA + 2 * (p - 1) * K * 4 * BETA)
    assert gtop_k(NETWORK, p, 0.001).seconds(M) == pytest.approx(2 * log * ALPHA + 4 * K * log * 4 * BETA)


def test_figure_9_crosses_between_8_and_32_workers():
    times = {p: (top_k(NETWORK, p, 0.001).seconds(M), gtop_k(NETWORK, p, 0.001).seconds(M)) for p in (4, 8, 16, 32)}
    assert times[4][0] < times[4][1]
    assert times[32][0] > 1.5 * times[32][1]


# Our own programs

CURVES = SparseCurves(
    share=0.01,
    encode=Curve(1e-9, 0.0),
    merge=Curve(2e-11, 1e-4),
    decode=Curve(4e-11, 2e-4),
    decode_add=Curve(2e-12, 1e-5),
)


def codec_cost(curves):
    by_op = {Op.ENCODE: curves.encode, Op.MERGE: curves.merge}
    return CodecCost(curves.share, lambda op, nbytes: by_op.get(op, curves.decode).seconds(nbytes))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 32, 33])
@pytest.mark.parametrize("strategy", ["gtopk", "gtopk_doubling"])
def test_a_closed_form_is_what_the_simulator_says_of_the_program(strategy, p):
    program = build("all_reduce", strategy, p, 1)
    simulated = simulate_program(program, NETWORK, int(M), codec=codec_cost(CURVES)).seconds
    closed = exchange_cost(strategy, NETWORK, p, CURVES) + selection_cost(CURVES)
    assert simulated <= closed.seconds(M) * (1 + 1e-9)
    if p == 1 << (p - 1).bit_length() or strategy == "gtopk_doubling":
        assert simulated == pytest.approx(closed.seconds(M), rel=1e-9)
    else:  # a merge may hide behind a message of a subtree that has fewer ranks, and is ready early
        assert simulated >= closed.seconds(M) - CURVES.merge.seconds(M) * (1 + 1e-9)


@pytest.mark.parametrize("p", [1, 2, 5, 8, 16])
def test_the_all_gathers_closed_form_is_what_the_simulator_says(p):
    """Its merges decode into the gradient: a decode each, here, since the simulator has one price for both."""
    curves = replace(CURVES, decode_add=CURVES.decode)
    simulated = simulate_program(build("all_reduce", "topk_allgather", p, 1), NETWORK, int(M), codec=codec_cost(curves))
    closed = exchange_cost("topk_allgather", NETWORK, p, curves) + selection_cost(curves)
    assert simulated.seconds == pytest.approx(closed.seconds(M), rel=1e-9)


def test_without_compute_the_tree_costs_what_the_paper_says():
    curves = SparseCurves(share=2 * 0.001)
    for p in (2, 4, 6, 32):
        assert exchange_cost("gtopk", NETWORK, p, curves).seconds(M) == pytest.approx(
            gtop_k(NETWORK, p, 0.001).seconds(M)
        )


def test_the_fastest_variant_is_the_all_gather_on_few_workers_and_doubling_on_many():
    curves = SparseCurves(share=2 * 0.005)
    assert fastest_variant(NETWORK, 2, curves, M) == "topk_allgather"  # one message either way; the first of equals
    assert {fastest_variant(NETWORK, p, curves, M) for p in (4, 8, 16, 64)} == {"gtopk_doubling"}
    assert fastest_variant(NETWORK, 3, curves, M) == "topk_allgather"  # folding costs two more messages


def test_the_tree_beats_the_all_gather_from_ten_workers_on_where_only_bytes_count():
    network = replace(NETWORK, alpha_seconds=0.0)
    assert first_world_size(network, SparseCurves(share=0.01), M) == 10  # 2 ceil(log2 9) = 8 messages against 8
    assert first_world_size(network, SparseCurves(share=0.01), M, "gtopk_doubling") == 6  # on 5: 4 against 4
    slow = SparseCurves(share=0.01, merge=Curve(1e-6, 0.0))
    assert first_world_size(network, slow, M) is None
