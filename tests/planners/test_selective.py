import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cost.papers import CASYNC, sync_seconds
from penstock.cost.ways import Way
from penstock.curves import CodecCurves, Curve
from penstock.errors import PlanError
from penstock.network import LinearCost
from penstock.planners.selective import best_partitions, choose, plan_selective
from planners.instances import make_trace

curves = st.builds(Curve, *(st.integers(0, 20).map(float) for _ in range(3)))
codecs = st.builds(CodecCurves, st.sampled_from([0.0, 0.03125, 0.25, 1.0]), curves, curves)


@given(st.sampled_from(sorted(CASYNC)), st.integers(2, 20), st.integers(0, 1000), curves, codecs)
def test_equals_trying_every_number_of_partitions(name, workers, nbytes, send, codec):
    """Eq. 1 and 2 are convex in K, so bisection finds what exhaustion finds."""
    found = choose(CASYNC[name], workers, nbytes, send, codec)
    every = {
        (curves is not None, k): sync_seconds(CASYNC[name], workers, k, nbytes, send, curves)
        for k in range(1, workers + 1)
        for curves in (None, codec)
    }
    assert found.seconds == pytest.approx(min(every.values()))
    assert found.seconds == every[found.compress, found.partitions]


def test_small_gradients_stay_dense_and_large_ones_do_not():
    send, codec = Curve(1.0, 10.0), CodecCurves(0.1, Curve(0.01, 20.0), Curve(0.01, 20.0))
    small, large = (choose(CASYNC["casync_ring"], 4, nbytes, send, codec) for nbytes in (10, 100_000))
    assert (small.compress, large.compress) == (False, True)


def test_on_a_tie_nothing_is_compressed():
    free = Curve(0.0, 0.0)
    assert not choose(CASYNC["casync_ring"], 4, 100, free, CodecCurves(1.0, free, free)).compress


def test_the_smallest_of_equally_good_numbers_is_taken():
    assert best_partitions(lambda k: max(5, 10 - k), 16) == 5


def test_each_tensor_goes_the_way_that_suits_it_alone():
    trace = make_trace([1, 1, 1], [1, 1000, 2])
    dense, packed = Way("ring", (LinearCost(1.0, 1.0),)), Way("ring", (LinearCost(50.0, 0.01),), codec="onebit")
    buckets = plan_selective(trace, [dense, packed])
    assert [bucket.codec for bucket in buckets] == [None, "onebit", None]
    with pytest.raises(PlanError, match="no way to send a bucket was given"):
        plan_selective(trace, [])
