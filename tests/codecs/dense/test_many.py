"""Several tensors in one payload: as if each had been encoded by itself, and nothing reaches beyond the output."""

from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.codecs.dense.many import read_table, table_nbytes
from penstock.codecs.header import NOT_FINITE, SEGMENTED, parse_header
from penstock.codecs.registry import codec_names, make_codec
from penstock.errors import CodecError, NonFiniteError

EDGES = np.array([0, 5, 5, 6, 1030, 3001])
NAMES = ["onebit", "terngrad", "topk", "adacomp"]  # a map, random numbers, a counted vector, a second input
OTHERS = sorted(set(codec_names()) - set(NAMES))


@pytest.fixture(scope="module", params=[*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def name(request):
    return request.param


def normal(seed=0):
    return np.random.default_rng(seed).standard_normal(EDGES[-1]).astype(np.float32)


def encode_many(codec, values, residual=None, edges=EDGES):
    out = np.full(codec.max_nbytes_many(edges) + 8, 0xAB, np.uint8)
    nbytes = codec.encode_many(values, edges, residual, out[:-8])
    assert (out[-8:] == 0xAB).all(), "encode_many wrote past the end of its buffer"
    return out[:nbytes]


def encode_each(codec, values, residual=None):
    """Encode every segment by itself; return what all of them decode to."""
    decoded = np.empty_like(values)
    for first, last in pairwise(EDGES):
        out = np.empty(codec.max_nbytes(last - first), np.uint8)
        left = None if residual is None else residual[first:last]
        nbytes = codec.encode(values[first:last], left, out)
        codec.decode(out[:nbytes], decoded[first:last])
    return decoded


def test_each_tensor_is_encoded_as_it_would_be_by_itself(name):
    wanted = encode_each(make_codec(name, seed=3), normal())
    codec = make_codec(name, seed=3)
    payload, found = encode_many(codec, normal()), np.empty(3001, np.float32)
    codec.decode_many(payload, EDGES, found)
    assert np.array_equal(found, wanted)
    assert codec.payload_nbytes(payload) == payload.size


def test_each_tensor_keeps_its_own_residual(name):
    ours, theirs = normal(1), normal(1)
    wanted = encode_each(make_codec(name), normal(), theirs)
    codec = make_codec(name)
    payload, found = encode_many(codec, normal(), ours), np.empty(3001, np.float32)
    codec.decode_many(payload, EDGES, found)
    assert np.array_equal(found, wanted)
    assert np.array_equal(ours, theirs)


def test_adding_rounds_product_and_sum(name):
    codec = make_codec(name)
    payload, plain, found = encode_many(codec, normal()), np.empty(3001, np.float32), normal(2)
    codec.decode_many(payload, EDGES, plain)
    codec.decode_add_many(payload, EDGES, found, scale=0.25)
    assert np.array_equal(found, normal(2) + np.float32(0.25) * plain)


def test_half_precision_is_taken_as_it_is():
    codec, values = make_codec("onebit"), normal().astype(np.float16)
    payload, wide, narrow = encode_many(codec, values), np.empty(3001, np.float32), np.empty(3001, np.float16)
    codec.decode_many(payload, EDGES, wide)
    codec.decode_many(payload, EDGES, narrow)
    assert np.array_equal(narrow, wide.astype(np.float16))


def test_the_tensor_that_is_not_finite_is_named_or_the_step_skipped():
    values = normal()
    values[1500] = np.nan
    out = np.empty(make_codec("topk").max_nbytes_many(EDGES), np.uint8)
    with pytest.raises(NonFiniteError, match="tensor 4 of 5 holds NaN or infinity"):
        make_codec("topk").encode_many(values, EDGES, None, out)
    with pytest.raises(NonFiniteError, match="fc holds NaN"):
        make_codec("topk").encode_many(values, EDGES, None, out, tensors=["a", "b", "c", "d", "fc"])
    skipping, residual, found = make_codec("topk", on_nonfinite="skip"), normal(1), np.zeros(3001, np.float32)
    payload = encode_many(skipping, values, residual)
    assert parse_header(payload.data).flags == NOT_FINITE | SEGMENTED
    skipping.decode_add_many(payload, EDGES, found)
    assert np.isnan(found).all()
    assert np.array_equal(residual, normal(1))


def test_boundaries_that_differ_are_refused():
    codec = make_codec("onebit")
    payload, out = encode_many(codec, normal()), np.empty(3001, np.float32)
    for edges in ([0, 6, 6, 7, 1030, 3001], [0, 3001]):
        with pytest.raises(CodecError, match="boundaries differ"):
            codec.decode_many(payload, edges, out)
    for edges in ([0, 7, 5, 3001], [1, 3001], [0, 3000], []):
        with pytest.raises(CodecError, match="wanted integers that ascend from 0 to 3001"):
            codec.decode_many(payload, edges, out)


def test_one_tensor_and_several_are_not_mixed_up():
    codec, out = make_codec("onebit"), np.empty(3001, np.float32)
    with pytest.raises(CodecError, match="payload of several tensors: read it with decode_many"):
        codec.decode(encode_many(codec, normal()), out)
    single = np.empty(codec.max_nbytes(3001), np.uint8)
    codec.encode(normal(), None, single)
    with pytest.raises(CodecError, match="payload of one tensor: read it with decode"):
        codec.decode_many(single, EDGES, out)


def test_too_little_room_is_refused():
    codec = make_codec("onebit")
    with pytest.raises(CodecError, match=r"room for 9 bytes; wanted \d+, which is what max_nbytes says"):
        codec.encode_many(normal(), EDGES, None, np.empty(9, np.uint8))
    with pytest.raises(CodecError, match="room for 9 bytes; wanted 433"):
        codec.encode(normal(), None, np.empty(9, np.uint8))


PAYLOADS = {spec: (make_codec(spec), encode_many(make_codec(spec), normal()).tobytes()) for spec in ("onebit", "topk")}


@settings(max_examples=200)
@given(st.sampled_from(sorted(PAYLOADS)), st.data())
def test_damage_never_reaches_beyond_the_output(spec, data):
    codec, honest = PAYLOADS[spec]
    damaged = bytearray(honest)
    table = 8 * (codec.header_nbytes + table_nbytes(5) + 16)
    for bit in data.draw(st.lists(st.integers(0, table), min_size=1, max_size=8)):
        damaged[bit // 8] ^= 1 << bit % 8
    room = np.full(3001 + 64, 5.0, np.float32)
    with suppress(CodecError):
        codec.decode_many(np.frombuffer(damaged, np.uint8), EDGES, room[32:-32])
    assert (room[:32] == 5).all()
    assert (room[-32:] == 5).all()


def test_a_table_of_other_sizes_is_refused():
    codec, payload = PAYLOADS["topk"]
    body = np.frombuffer(payload, np.uint8)[codec.header_nbytes :].copy()
    body[8] += 1  # the bytes of the first segment
    with pytest.raises(CodecError, match=r"bodies of \d+ bytes in a payload of \d+: it is damaged"):
        read_table(body, EDGES)
