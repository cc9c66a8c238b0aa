import pytest

from penstock.cost.clusters import CLUSTERS
from penstock.curves import CodecCurves, Curve
from penstock.network import Network
from penstock.simulator.auto import decide_codec
from penstock.simulator.iteration import simulate_iteration
from penstock.traces import load_shipped

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
    assert decision.reason.startswith("compression is on: onebit for ")
    assert decision.reason.endswith(f": {speed:.2f} times as fast")
    again = simulate_iteration(trace, decision.plan.buckets, decision.ways)
    assert again.iteration_seconds == decision.plan.iteration_seconds


@pytest.mark.parametrize(
    ("codecs", "wanted", "beta", "workers", "reason"),
    [
        ({"onebit": ONEBIT}, None, 1e-12, None, "with onebit no message would be faster; predicted iteration"),
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


def test_published_clusters_without_curves_plan_dense():
    decision = decide_codec(load_shipped("resnet50"), CLUSTERS["gtop-k-1gbe"], ["onebit"], ["ring", "double_tree"])
    assert not decision.compresses
    assert {bucket.strategy for bucket in decision.plan.buckets} <= {"ring", "double_tree"}
