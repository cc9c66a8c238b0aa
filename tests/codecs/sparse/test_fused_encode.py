"""Encoding in one pass makes the bytes that the usual encode makes, whatever a tensor's past says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.codecs.codec import HeaderCodec
from penstock.codecs.feedback import DeferredResidual
from penstock.codecs.header import NOT_FINITE, parse_header
from penstock.codecs.registry import make_codec
from penstock.codecs.sparse.fused_encode import HISTORY, ROUND, add_and_select
from penstock.codecs.sparse.sparse_codec import SparseCodec
from penstock.compll.select import select_largest
from penstock.errors import NonFiniteError

FORMS = st.builds(SparseCodec, st.sampled_from([0.002, 0.05, 0.7, 1.0]), index_form=st.sampled_from(["int32", "gaps"]))
CHANGES = st.lists(st.sampled_from([0.0, 1e-3, 0.9, 1.0, 1.1, 50.0]), min_size=3, max_size=6)  # from step to step


def steps(rng, numel, changes):
    """Yield gradients that shrink, grow and repeat, some of whose values are equal."""
    gradient = rng.standard_normal(numel, np.float32).round(1)
    for change in changes:
        gradient = gradient * np.float32(change)
        yield gradient if change == 1.0 else gradient + rng.standard_normal(numel, np.float32).round(2) * gradient


@given(FORMS, st.sampled_from([1, 2, 63, 1000, 3 * ROUND + 65]), CHANGES, st.integers(0, 99))
def test_bytes_and_residual_are_those_of_the_usual_encode(codec, numel, changes, seed):
    gradient, rng = np.zeros(numel, np.float32), np.random.default_rng(seed)
    blocks = [np.zeros(codec.max_nbytes(numel), np.uint8) for _ in range(2)]
    kept = [DeferredResidual(np.zeros(numel, np.float32)).piece(0, numel, 0.3) for _ in range(2)]
    encode = codec.bind_encode(gradient, kept[0], blocks[0])
    for values in steps(rng, numel, changes):
        gradient[:] = values
        encode()
        nbytes = codec.encode(gradient, kept[1], blocks[1])
        assert blocks[0][:nbytes].tobytes() == blocks[1][:nbytes].tobytes()
        assert kept[0].values().tobytes() == kept[1].values().tobytes()


def test_a_scaled_gradient_is_rounded_before_it_is_added():
    codec, gradient = SparseCodec(0.01), np.random.default_rng(0).standard_normal(1000, np.float32)
    kept, before = np.ones(1000, np.float32), np.ones(1000, np.float32)
    block, sent = np.zeros(codec.max_nbytes(1000), np.uint8), np.zeros(1000, np.float32)
    codec.bind_encode(gradient, DeferredResidual(kept).piece(0, 1000, 1 / 3), block)()
    codec.decode(block, sent)
    assert np.array_equal(kept + sent, before + gradient * np.float32(1 / 3))


@pytest.mark.parametrize("past", [(0, 0), (1, 1), (0x7F7FFFFF, 1), (0x3F800000, 0x3F000000), (0x7F800000, 0x7F800000)])
def test_a_past_that_misleads_changes_nothing(past):
    rng = np.random.default_rng(1)
    values, kept = rng.standard_normal(50_000, np.float32), rng.standard_normal(50_000, np.float32)
    indices, wanted, history = np.zeros(50, np.int32), np.zeros(50, np.int32), np.array(past, np.int32)
    select_largest(kept + np.float32(0.5) * values, wanted)
    add_and_select(values, np.float32(0.5), kept, history, indices)
    assert np.array_equal(indices, wanted)
    assert history.size == HISTORY
    assert history[0] == np.abs(kept[wanted]).min().view(np.int32)
    assert history[1] == past[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("step", [0, 4])
def test_a_gradient_that_is_not_finite_is_found(bad, step):
    codec, gradient = SparseCodec(0.01), np.ones(5000, np.float32)
    block = np.zeros(codec.max_nbytes(5000), np.uint8)
    encode = codec.bind_encode(gradient, DeferredResidual(np.zeros(5000, np.float32)).piece(0, 5000), block)
    for _ in range(step):
        encode()
    gradient[4321] = bad
    encode()
    assert parse_header(block.data).flags == NOT_FINITE
    with pytest.raises(NonFiniteError, match="the gradient holds NaN or infinity; fix the loss"):
        codec.check_finite()


def test_in_training_it_is_sent_as_such():
    codec, gradient, out = (
        make_codec("sparse(density=0.01)", on_nonfinite="note"),
        np.ones(500, np.float32),
        np.zeros(500, np.float32),
    )
    block = np.zeros(codec.max_nbytes(500), np.uint8)
    encode = codec.bind_encode(gradient, DeferredResidual(np.zeros(500, np.float32)).piece(0, 500), block)
    encode()
    assert not codec.saw_nonfinite()
    gradient[7] = np.nan
    encode()
    assert codec.saw_nonfinite()
    codec.decode(block, out)
    assert np.isnan(out).all()


@pytest.mark.parametrize(
    ("codec", "residual"),
    [
        (SparseCodec(0.1), np.zeros(9, np.float32)),
        (SparseCodec(0.1), None),
        (SparseCodec(0.1, on_nonfinite="skip"), DeferredResidual(np.zeros(9, np.float32)).piece(0, 9)),
        (SparseCodec(0.1, value_bits=16), DeferredResidual(np.zeros(9, np.float32)).piece(0, 9)),
    ],
)
def test_what_it_cannot_do_is_left_to_the_usual_encode(codec, residual):
    encode = codec.bind_encode(np.zeros(9, np.float32), residual, np.zeros(codec.max_nbytes(9), np.uint8))
    assert encode.__qualname__.startswith(HeaderCodec.__name__)
