"""The three BSP-SGD algorithms, against timelines drawn by hand and the bounds of section 3.3."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.reproduce.linear_pipeline import Costs, all_reduce_seconds, layers_seconds, reduce_broadcast_seconds
from penstock.trace import Tensor, Trace

PER_BYTE = Costs(lambda nbytes: nbytes / 4, lambda nbytes: nbytes / 4, lambda nbytes: nbytes / 2)


def trace_of(forward, *backward_and_numel):
    tensors = (Tensor(f"t{i}", numel, seconds) for i, (seconds, numel) in enumerate(backward_and_numel))
    return Trace("drawn", "none", 1, "float32", forward, tuple(tensors))


def test_without_overlap_computation_and_communication_add_up():
    trace = trace_of(1.0, (1.0, 1), (1.0, 1))  # 3 s of computation, 8 bytes
    assert reduce_broadcast_seconds(trace, PER_BYTE) == pytest.approx(3 + 2 + 2)
    assert all_reduce_seconds(trace, PER_BYTE) == pytest.approx(3 + 4 + 2 / 5)
    assert all_reduce_seconds(trace, PER_BYTE, resync_every=None) == pytest.approx(3 + 4)


def test_two_layers_as_drawn_by_hand():
    """Layer 1 is t1, since t0's gradient is ready first. Times since the update of the iteration before:

    network  b1 0-1, b2 1-2                  r2 4-5 (after B2), r1 5-6 (after B1)
    compute  F1 1-2, F2 2-3,  B2 3-4, B1 4-5                                       next update at 6
    """
    assert layers_seconds(trace_of(2.0, (1.0, 1), (1.0, 1)), PER_BYTE) == pytest.approx(6.0)


seconds = st.floats(0.001, 5)


@given(seconds, st.lists(st.tuples(seconds, st.integers(1, 50)), min_size=1, max_size=12))
def test_overlap_lies_between_its_bounds(forward, tensors):
    trace = trace_of(forward, *tensors)
    nbytes = sum(trace.nbytes)
    communication = PER_BYTE.reduce(nbytes) + PER_BYTE.broadcast(nbytes)
    steady = layers_seconds(trace, PER_BYTE)
    assert steady >= max(trace.compute_seconds, communication) - 1e-9
    assert steady <= reduce_broadcast_seconds(trace, PER_BYTE) + 1e-9
