from dataclasses import replace

import pytest
from hypothesis import given

from penstock.cost.clusters import CLUSTERS
from penstock.cost.ways import Way
from penstock.curves import CodecCurves, Curve
from penstock.network import LinearCost, Network
from penstock.simulator.auto import decide_among, decide_codec
from penstock.simulator.iteration import TIE, simulate_iteration
from penstock.trace import Tensor, Trace
from penstock.traces import load_shipped
from planners.instances import codec_ways, traces
from planners.oracle import brute_force_seconds

ONEBIT = CodecCurves(1 / 32, Curve(1e-10, 1e-5), Curve(1e-10, 1e-5), fixed_nbytes=57)
SLOW = CodecCurves(1 / 32, Curve(1e-7, 1e-2), Curve(1e-7, 1e-2))


def network(beta, codecs):
    return Network(4, 1e-4, beta, 1e-10, codecs=codecs)


def test_a_slow_network_is_worth_compressing_for():
    trace = load_shipped("vgg16")
    decision = decide_codec(trace, network(8e-9, {"onebit": ONEBIT}))
    assert decision.compresses
    assert decision.plan.iteration_seconds < 0.5 * decision.dense.iteration_seconds
    speed = decision.dense.iteration_seconds / decision.plan.iteration_seconds
    assert decision.reason.startswith("compression is on: onebit for all gradients, ")
    times = [1e3 * plan.iteration_seconds for plan in (decision.dense, decision.candidates["onebit"])]
    assert decision.reason.endswith(
        f" gradients, {speed:.2f} times as fast as dense; "
        f"predicted iteration: dense {times[0]:.4g} ms, onebit {times[1]:.4g} ms"
    )
    again = simulate_iteration(trace, decision.plan.buckets, decision.ways)
    assert again.iteration_seconds == decision.plan.iteration_seconds


@pytest.mark.parametrize(
    ("codecs", "wanted", "beta", "workers", "reason"),
    [
        ({"onebit": ONEBIT}, None, 1e-12, None, "with onebit no message would be faster; "),
        ({"slow": SLOW}, None, 8e-9, None, "with slow no message would be faster"),
        ({}, None, 8e-9, None, "what any codec would cost was not measured; measure it with `penstock"),
        ({"slow": SLOW}, ["dgc"], 8e-9, None, "what dgc would cost was not measured"),
        ({"onebit": ONEBIT}, None, 8e-9, 1, "one worker sends nothing"),
    ],
)  # fmt: skip
def test_where_it_does_not_pay_it_is_left_off_and_said_why(codecs, wanted, beta, workers, reason):
    links, by = network(beta, codecs), ("ring", "parameter_server")  # an all-gather saves startups on any network
    decision = decide_codec(load_shipped("resnet50"), links, wanted, compressed_strategies=by, workers=workers)
    assert not decision.compresses
    assert decision.plan == decision.dense
    assert decision.reason.startswith(f"compression is left off: {reason}")


def test_a_small_gain_is_not_enough():
    trace = load_shipped("resnet50")
    links = network(8e-9, {"onebit": ONEBIT})
    gain = 1 - decide_codec(trace, links).plan.iteration_seconds / decide_codec(trace, links).dense.iteration_seconds
    assert decide_codec(trace, links, least_gain=gain - 0.01).compresses
    decision = decide_codec(trace, links, least_gain=gain + 0.01)
    assert not decision.compresses
    assert f"it must save at least {100 * (gain + 0.01):.0f}%" in decision.reason


def lines(**milliseconds):
    """Return ways of one tensor of 4000 bytes that take so long: `dense`, and codecs by name."""
    ways = {name: Way("ring", (LinearCost(1e-3 * each, 0.0),), codec=name) for name, each in milliseconds.items()}
    return replace(ways.pop("dense"), codec=None), {name: [way] for name, way in ways.items()}


def test_where_some_gradients_stay_dense_it_says_how_many_bytes_are_compressed():
    """A byte costs a tenth of a second dense; a codec a hundredth and ten seconds for each message."""
    trace = Trace("toy", "cpu", 1, "float32", 0.0, (Tensor("large", 1000, 0.0), Tensor("small", 10, 100.0)))
    dense, packed = Way("ring", (LinearCost(0.0, 0.1),)), Way("ring", (LinearCost(10.0, 0.01),), codec="onebit")
    found = decide_among(trace, 4, [dense], {"onebit": [packed]})
    assert [bucket.codec for bucket in found.plan.buckets] == ["onebit", None]
    assert found.reason.startswith("compression is on: onebit for 99% of the gradients' bytes, 3.88 times as fast")


@pytest.mark.parametrize(
    ("milliseconds", "wanted"),
    [
        ({"dense": 100, "safe": 94, "bold": 80}, "bold"),
        ({"dense": 100, "safe": 94, "bold": 90}, "safe"),  # not 5% more than the safe one saves
        ({"dense": 100, "safe": 97, "bold": 94}, "bold"),  # 6% of dense; the safe one does not pay at all
        ({"dense": 100, "safe": 80, "bold": 94}, "safe"),
        ({"dense": 100, "safe": 96, "bold": 96}, None),
        ({"dense": 100, "safe": 300, "bold": 200}, None),
    ],
)
def test_a_bolder_codec_must_save_clearly_more_than_a_safer_one(milliseconds, wanted):
    dense, packed = lines(**milliseconds)
    found = decide_among(Trace("toy", "cpu", 1, "float32", 0.0, (Tensor("t", 1000, 0.0),)), 4, [dense], packed)
    assert found.plan_codec == wanted
    assert found.reason.startswith("compression is " + (f"on: {wanted} for all gradients" if wanted else "left off: "))
    times = {name: min(each, milliseconds["dense"]) for name, each in milliseconds.items()}  # each may stay dense
    said = ", ".join(f"{name} {each} ms" for name, each in times.items())
    assert found.reason.endswith(f"; predicted iteration: {said}")
    assert "\n" not in found.reason


@given(traces(8), codec_ways(5))
def test_each_codecs_plan_is_within_the_tie_of_the_best_of_all_its_schedules(trace, ways):
    dense, packed = ways[:2], ways[2:]
    found = decide_among(trace, 4, dense, {"onebit": packed} if packed else {})
    assert found.dense.iteration_seconds <= brute_force_seconds(trace, dense) / (1 - TIE)
    for plan in found.candidates.values():
        assert plan.iteration_seconds <= brute_force_seconds(trace, ways) / (1 - TIE)


def test_published_clusters_without_curves_plan_dense():
    decision = decide_codec(load_shipped("resnet50"), CLUSTERS["gtop-k-1gbe"], ["onebit"], ["ring", "double_tree"])
    assert not decision.compresses
    assert {bucket.strategy for bucket in decision.plan.buckets} <= {"ring", "double_tree"}
