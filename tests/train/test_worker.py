"""The record of a run names its codec as the user did, and finds its cost by the name that plans use."""

import pytest

from penstock.curves import CodecCurves, Curve
from penstock.network import Network
from penstock.plan import Bucket, Plan
from penstock.train.worker import _codec_cost

CURVES = CodecCurves(0.01, Curve(2e-10, 1e-5), Curve(1e-10, 3e-5))
NETWORK = Network(4, 1e-4, 1e-9, 1e-10, codecs={"sparse(density=0.1)": CURVES})


def plan(*codecs):
    buckets = tuple(Bucket((f"t{i}",), 4 << i, "ring", codec) for i, codec in enumerate(codecs))
    return Plan("toy", 4, "exact", buckets)


def test_a_sparse_codec_s_cost_is_found():
    cost = _codec_cost(NETWORK, plan("sparse(density=0.1)", None))
    assert cost.ratio == 0.01
    assert cost.encode.seconds_per_byte == 2e-10
    assert cost.decode.seconds_per_byte == pytest.approx(1e-8)  # of compressed bytes


@pytest.mark.parametrize("codecs", [("onebit",), (None,), ("sparse(density=0.1)", "onebit")])
def test_there_is_none_where_nobody_measured_the_codec_of_most_bytes(codecs):
    assert _codec_cost(NETWORK, plan(*codecs)) is None


def test_torchs_own_wrapper_has_no_plan_and_no_codec():
    assert _codec_cost(NETWORK, None) is None
