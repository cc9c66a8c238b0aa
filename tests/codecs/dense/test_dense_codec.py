"""Every codec as training uses it: round trips, element types, error feedback, and gradients that are not finite."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.codecs.dense.dense_codec import DenseCodec
from penstock.codecs.feedback import Residual
from penstock.codecs.header import NOT_FINITE, parse_header
from penstock.codecs.registry import codec_names, make_codec
from penstock.compll.backends.reference import ReferenceKernels
from penstock.errors import CodecError, NonFiniteError

FLOATS = st.floats(-65_000, 65_000, width=32)  # which a half holds too
GRADIENTS = hnp.arrays(np.float32, st.integers(0, 200), elements=FLOATS)


@pytest.fixture(scope="module", params=codec_names())
def codec(request) -> DenseCodec:
    return make_codec(request.param)


def encode(codec, gradient, residual=None):
    out = np.full(codec.max_nbytes(gradient.size) + 8, 0xAB, np.uint8)
    nbytes = codec.encode(gradient, residual, out[:-8])
    assert (out[-8:] == 0xAB).all(), "encode wrote past the end of its buffer"
    return out[:nbytes]


def decode(codec, payload, numel):
    out = np.full(numel + 16, 7.0, np.float32)
    codec.decode(payload, out[8:-8])
    assert (out[:8] == 7).all(), "decode wrote before its output"
    assert (out[-8:] == 7).all(), "decode wrote behind its output"
    return out[8:-8]


def normal(numel, seed=0):
    return np.random.default_rng(seed).standard_normal(numel).astype(np.float32)


@settings(max_examples=40)
@given(gradient=GRADIENTS)
def test_decoding_gives_what_the_reference_says_the_payload_means(codec, gradient):
    payload = encode(codec, gradient)
    body = payload[codec.header_nbytes :]
    wanted = ReferenceKernels(codec.program).decode(body, gradient.size, codec.arguments)
    assert np.array_equal(decode(codec, payload, gradient.size), wanted)


@settings(max_examples=40)
@given(gradient=GRADIENTS, start=st.floats(-100, 100, width=32))
def test_gradient_and_residual_before_are_decoded_and_residual_after(codec, gradient, start):
    residual = np.full(gradient.size, start, np.float32)
    total = gradient + residual
    payload = encode(codec, gradient, residual)
    assert np.array_equal(residual, total - decode(codec, payload, gradient.size))


def test_feedback_sends_everything_in_the_end(codec):
    """A constant gradient: what has been decoded after n steps is n times it, less the residual."""
    gradient, residual = normal(3000), np.zeros(3000, np.float32)
    decoded = np.zeros(3000)
    for _ in range(20):
        decoded += decode(codec, encode(codec, gradient, residual), 3000)
    np.testing.assert_allclose(decoded + residual, 20.0 * gradient, rtol=1e-4, atol=1e-4)


def test_decode_add_adds_a_multiple(codec):
    gradient, start = normal(1000), normal(1000, seed=1)
    payload = encode(codec, gradient)
    found = start.copy()
    codec.decode_add(payload, found, scale=0.25)
    assert np.array_equal(found, start + np.float32(0.25) * decode(codec, payload, 1000))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_gradients_are_taken_as_they_are(codec, dtype):
    torch = pytest.importorskip("torch")
    gradient = torch.from_numpy(normal(500)).to(getattr(torch, dtype))
    out = torch.empty(codec.max_nbytes(500), dtype=torch.uint8)
    same = make_codec(codec.program.name)  # both at their first call: the same random numbers
    nbytes = make_codec(codec.program.name).encode(gradient, None, out)
    assert np.array_equal(encode(same, gradient.float().numpy()), out[:nbytes].numpy())
    back = torch.empty_like(gradient)
    codec.decode(out[:nbytes], back)
    wanted = torch.from_numpy(decode(codec, out[:nbytes].numpy(), 500).copy()).to(gradient.dtype)
    assert torch.equal(back, wanted)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_is_named(codec, bad):
    gradient = normal(300)
    gradient[217] = bad
    out = np.zeros(codec.max_nbytes(300), np.uint8)
    with pytest.raises(
        NonFiniteError, match=r"conv1\.weight holds NaN or infinity; fix the loss, or pass on_nonfinite"
    ):
        codec.encode(gradient, None, out, tensor="conv1.weight")


def test_skipping_makes_every_rank_see_nan_and_leaves_the_residual_alone(codec):
    skipping = make_codec(codec.program.name, on_nonfinite="skip")
    gradient, residual = normal(300), normal(300, seed=1)
    gradient[5] = np.inf
    before = residual.copy()
    payload = encode(skipping, gradient, residual)
    assert np.array_equal(residual, before)
    assert parse_header(payload.tobytes()).flags == NOT_FINITE
    assert np.isnan(decode(skipping, payload, 300)).all()
    total = normal(300)
    skipping.decode_add(payload, total)
    assert np.isnan(total).all()


@pytest.mark.parametrize("name", ["fp16", "qsgd"])
def test_values_that_a_codec_cannot_hold_are_told_from_those_that_are_not_finite(name):
    codec, gradient = make_codec(name), np.full(300, 1e30, np.float32)
    with pytest.raises(
        NonFiniteError, match=rf"conv1\.weight, with what is owed .* are too large for {name}\(.*\); fix"
    ):
        codec.encode(gradient, None, np.zeros(codec.max_nbytes(300), np.uint8), tensor="conv1.weight")


@pytest.mark.parametrize("kind", [np.asarray, Residual])
def test_a_step_skipped_since_its_values_are_too_large_leaves_the_residual_alone(kind):
    codec = make_codec("fp16", on_nonfinite="skip")
    residual = kind(np.zeros(300, np.float32))
    encode(codec, normal(300), residual)
    before = np.array(residual.values() if kind is Residual else residual)
    payload = encode(codec, np.full(300, 70_000, np.float32), residual)
    assert parse_header(payload.tobytes()).flags == NOT_FINITE
    assert np.array_equal(residual.values() if kind is Residual else residual, before)
    assert before.any()


def test_each_call_draws_other_random_numbers_and_each_seed_too():
    gradient = normal(4000)
    codec, other = make_codec("terngrad"), make_codec("terngrad", seed=1)
    first, second, third = encode(codec, gradient), encode(codec, gradient), encode(other, gradient)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, third)
    assert np.array_equal(first, encode(make_codec("terngrad"), gradient))


def test_a_codec_can_be_used_from_several_threads(codec):
    gradient = normal(20_000)
    results = {}

    def work(number):
        results[number] = [decode(codec, encode(codec, gradient), gradient.size).copy() for _ in range(5)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    scale = np.abs(gradient).max()
    for found in (item for items in results.values() for item in items):
        assert np.isfinite(found).all()
        assert np.abs(found - gradient).max() <= 2 * scale


@pytest.mark.parametrize("residual", [np.zeros(3, np.float32), np.zeros(300)])
def test_a_residual_of_another_size_or_type_is_refused(codec, residual):
    with pytest.raises(CodecError, match=r"the residual of w has .*; wanted 300 of float32"):
        codec.encode(normal(300), residual, np.zeros(codec.max_nbytes(300), np.uint8), tensor="w")


def test_a_residual_that_is_put_off_is_the_one_subtracted_at_once(codec):
    left, kept = np.zeros(2000, np.float32), Residual(np.zeros(2000, np.float32))
    for step in range(3):
        payload = encode(codec, normal(2000, step), kept)
        left = (normal(2000, step) + left) - decode(codec, payload, 2000)
    assert np.array_equal(kept.values(), left)
    assert kept.pending is None


def test_a_residual_handed_to_another_codec_is_settled_first():
    left, kept = np.zeros(500, np.float32), Residual(np.zeros(500, np.float32))
    for name in ("onebit", "tbq", "topk", "onebit"):
        left = (normal(500) + left) - decode(make_codec(name), encode(make_codec(name), normal(500), kept), 500)
    assert np.array_equal(kept.values(), left)


def test_strided_memory_and_integers_are_refused():
    codec = make_codec("onebit")
    out = np.zeros(codec.max_nbytes(10), np.uint8)
    with pytest.raises(CodecError, match="contiguous memory"):
        codec.encode(normal(20)[::2], None, out)
    with pytest.raises(CodecError, match="gradients of int64 cannot be encoded; use float32, float16 or bfloat16"):
        codec.encode(np.arange(10), None, out)


def test_calls_of_programs_read_the_payload_at_the_start_of_its_buffer(codec):
    gradient, buffer = normal(700), np.full(codec.max_nbytes(700), 0xCD, np.uint8)
    codec.bind_encode(gradient, None, buffer)()
    assert codec.payload_nbytes(buffer) <= buffer.size
    once, twice = np.empty(700, np.float32), np.zeros(700, np.float32)
    codec.bind_decode(buffer, once, adds=False)()
    codec.bind_decode(buffer, twice, adds=True)()
    codec.bind_decode(buffer, twice, adds=True)()
    assert np.array_equal(twice, once + once)


@pytest.mark.parametrize("position", range(0, 48, 3))
def test_a_damaged_header_is_refused_by_calls_of_programs_too(position):
    codec, out = make_codec("onebit"), np.zeros(100, np.float32)
    buffer = np.zeros(codec.max_nbytes(100), np.uint8)
    codec.encode(normal(100), None, buffer)
    buffer[position] ^= 0xFF
    with pytest.raises(CodecError):
        codec.bind_decode(buffer, out, adds=False)()
