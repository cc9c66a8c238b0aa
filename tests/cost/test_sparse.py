from dataclasses import replace

import pytest

from penstock.cost.clusters import CLUSTERS
from penstock.cost.papers import dense, gtop_k, top_k
from penstock.cost.ways import way_for, ways_for
from penstock.curves import CodecCurves, Curve
from penstock.errors import NetworkError
from penstock.plan import Route
from penstock.program import Op
from penstock.simulator.auto import decide_codec
from penstock.simulator.program import CodecCost, simulate_program
from penstock.strategies import STRATEGIES, build, sparse_names
from penstock.strategies.closed_form import curve_line
from penstock.strategies.closed_form import exchange_cost as cost_of_steps
from penstock.traces import load_shipped

NETWORK = CLUSTERS["gtop-k-1gbe"]
ALPHA, BETA = 0.436e-3, 9e-9
M = 100e6  # bytes of the dense gradient
K = 0.001 * M / 4  # entries of 4-byte values and 4-byte indices


@pytest.mark.parametrize("strategy", ["gtopk", "gtopk_doubling"])
@pytest.mark.parametrize("p", range(1, 18))
def test_rounds_hold_every_message_and_every_merge_of_the_program(strategy, p):
    instructions = [each for rank in build("all_reduce", strategy, p, 1).ranks for each in rank]
    steps = STRATEGIES[strategy].steps(p)
    for op, counts in (
        (Op.SEND, [each.messages for each in steps.rounds]),
        (Op.MERGE, [r.merges for r in steps.rounds]),
    ):
        assert sum(counts) == sum(each.op is op for each in instructions)
    assert len(steps.rounds) == steps.messages
    assert sum(each.merges > 0 for each in steps.rounds) == steps.merges


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

FREE = Curve(0.0, 0.0)


def block_curves(share):
    """Return the curves of blocks that cost nothing but their bytes, as the paper counts; `share` of the dense ones."""
    return CodecCurves(share, FREE, FREE, block_merge=FREE)


def exchange_cost(strategy, network, p, codec):
    return cost_of_steps(STRATEGIES[strategy].steps(p), network, codec)


def selection_cost(codec):
    return curve_line(codec.encode)


CURVES = CodecCurves(
    ratio=0.01,
    encode=Curve(1e-9, 0.0),
    block_merge=Curve(2e-11, 1e-4),
    decode=Curve(4e-11, 2e-4),
    decode_add=Curve(2e-12, 1e-5),
)


def codec_cost(curves):
    by_op = {Op.ENCODE: curves.encode, Op.MERGE: curves.block_merge}
    return CodecCost(curves.ratio, lambda op, nbytes: by_op.get(op, curves.decode).seconds(nbytes))


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
        assert simulated >= closed.seconds(M) - CURVES.block_merge.seconds(M) * (1 + 1e-9)


@pytest.mark.parametrize("p", [1, 2, 5, 8, 16])
def test_the_all_gathers_closed_form_is_what_the_simulator_says(p):
    """Its merges decode into the gradient: a decode each, here, since the simulator has one price for both."""
    curves = replace(CURVES, decode_add=CURVES.decode)
    simulated = simulate_program(build("all_reduce", "topk_allgather", p, 1), NETWORK, int(M), codec=codec_cost(curves))
    closed = exchange_cost("topk_allgather", NETWORK, p, curves) + selection_cost(curves)
    assert simulated.seconds == pytest.approx(closed.seconds(M), rel=1e-9)


def test_without_compute_the_tree_costs_what_the_paper_says():
    curves = block_curves(2 * 0.001)
    for p in (2, 4, 6, 32):
        assert exchange_cost("gtopk", NETWORK, p, curves).seconds(M) == pytest.approx(
            gtop_k(NETWORK, p, 0.001).seconds(M)
        )


# As planners see them


def network_with(curves, workers=16):
    codecs = {"sparse(density=0.005)": curves, "onebit": replace(curves, block_merge=None)}
    return replace(NETWORK, workers=workers, codecs=codecs)


def test_a_way_costs_selection_and_exchange():
    network = network_with(CURVES)
    for strategy in sparse_names():
        way = way_for(network, f"{strategy}+sparse(density=0.005)")
        wanted = selection_cost(CURVES) + exchange_cost(strategy, NETWORK, 16, CURVES)
        assert way.seconds(M) == pytest.approx(wanted.seconds(M))
        assert way.route == Route(strategy, "sparse(density=0.005)")


def test_each_tensor_of_a_bucket_brings_its_own_calls_but_no_message():
    way = way_for(network_with(CURVES), "gtopk+sparse(density=0.005)")
    calls = 4 * CURVES.block_merge.startup_seconds + CURVES.decode.startup_seconds
    assert way.seconds(M, 3) - way.seconds(M, 1) == pytest.approx(2 * calls)


def test_planners_are_offered_merging_only_with_codecs_that_can():
    ways = ways_for(network_with(CURVES), ["ring", "gtopk_doubling"], ["sparse(density=0.005)", "onebit"])
    assert [str(way.route) for way in ways if way.strategy.startswith("gtopk")] == [
        "gtopk_doubling+sparse(density=0.005)"
    ]
    with pytest.raises(NetworkError, match="gtopk merges blocks, which onebit cannot; use sparse"):
        way_for(network_with(CURVES), "gtopk+onebit")


def test_the_planner_picks_the_variant_that_costs_least():
    trace = load_shipped("resnet50")
    for workers, wanted in ((3, "topk_allgather"), (16, "gtopk_doubling")):
        network = network_with(block_curves(0.01), workers)
        decision = decide_codec(trace, network, ["sparse(density=0.005)"], compressed_strategies=sparse_names())
        assert {bucket.strategy for bucket in decision.plan.buckets} == {wanted}
