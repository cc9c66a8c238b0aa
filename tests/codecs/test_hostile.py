"""Bytes that no codec wrote: refused with a `CodecError`, and nothing outside the output is touched."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.codecs.header import Header, pack_header
from penstock.codecs.registry import codec_names, make_codec
from penstock.errors import CodecError

NUMEL = 257
CODECS = {name: make_codec(name) for name in codec_names()}


def payload_of(name, numel=NUMEL):
    codec = CODECS[name]
    out = np.zeros(codec.max_nbytes(numel), np.uint8)
    gradient = np.random.default_rng(3).standard_normal(numel).astype(np.float32)
    return out[: codec.encode(gradient, None, out)].tobytes()


PAYLOADS = {name: payload_of(name) for name in CODECS}
NAMES = st.sampled_from(sorted(CODECS))


def try_decode(name, data):
    """Say whether the codec took the bytes; False if it refused them cleanly."""
    taken, kept = decode_between_guards(name, data)
    assert kept
    return taken


def decode_between_guards(name, data):
    """Return whether the codec took the bytes, and whether the memory before and after its output is as it was."""
    room = np.full(NUMEL + 64, 5.0, np.float32)
    try:
        CODECS[name].decode(np.frombuffer(data, np.uint8), room[32:-32])
        taken = True
    except CodecError as error:
        taken = False
        message = str(error)
    assert taken or "\n" not in message
    return taken, bool((room[:32] == 5).all() and (room[-32:] == 5).all())


@given(NAMES, st.data())
def test_truncated_payloads_are_refused(name, data):
    whole = PAYLOADS[name]
    assert not try_decode(name, whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(NAMES, st.binary(min_size=1, max_size=64))
def test_extended_payloads_are_refused(name, more):
    assert not try_decode(name, PAYLOADS[name] + more)


@given(NAMES, NAMES)
def test_a_payload_of_another_codec_is_refused(name, other):
    assert try_decode(name, PAYLOADS[other]) == (name == other)


@settings(max_examples=400)
@given(NAMES, st.data())
def test_flipped_bits_never_reach_beyond_the_output(name, data):
    damaged = bytearray(PAYLOADS[name])
    for bit in data.draw(st.lists(st.integers(0, 8 * len(damaged) - 1), min_size=1, max_size=8)):
        damaged[bit // 8] ^= 1 << bit % 8
    taken, kept = decode_between_guards(name, bytes(damaged))
    assert kept
    header = CODECS[name].header_nbytes
    if damaged[:header] != PAYLOADS[name][:header]:
        assert not taken, "a changed header was believed"


@settings(max_examples=400)
@given(NAMES, st.data())
def test_arbitrary_bodies_under_an_honest_header_never_reach_beyond_the_output(name, data):
    codec = CODECS[name]
    most = codec.max_nbytes(NUMEL) - codec.header_nbytes
    body = data.draw(st.binary(max_size=most))
    flags = data.draw(st.integers(0, 7))
    header = Header(codec.program.name, tuple(codec.parameters.values()), NUMEL, len(body), flags)
    _, kept = decode_between_guards(name, pack_header(header) + body)
    assert kept


@pytest.mark.parametrize("name", ["topk", "dgc", "graddrop"])
@pytest.mark.parametrize("index", [-1, NUMEL, 2**31 - 1, -(2**31)])
def test_an_index_outside_the_gradient_is_refused(name, index):
    damaged = bytearray(PAYLOADS[name])
    start = CODECS[name].header_nbytes + 4
    damaged[start : start + 4] = struct.pack("<i", index)
    with pytest.raises(CodecError, match=r"index|indices|outside"):
        CODECS[name].decode(np.frombuffer(damaged, np.uint8), np.zeros(NUMEL, np.float32))


@pytest.mark.parametrize("count", [-1, NUMEL + 1, 2**31 - 1])
def test_a_count_too_large_is_refused(count):
    damaged = bytearray(PAYLOADS["topk"])
    start = CODECS["topk"].header_nbytes
    damaged[start : start + 4] = struct.pack("<i", count)
    with pytest.raises(CodecError, match=f"{count}; wanted 0 to {NUMEL}"):
        CODECS["topk"].decode(np.frombuffer(damaged, np.uint8), np.zeros(NUMEL, np.float32))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_is_refused(value):
    damaged = bytearray(PAYLOADS["onebit"])
    start = CODECS["onebit"].header_nbytes + 1
    damaged[start : start + 4] = struct.pack("<f", value)
    with pytest.raises(CodecError, match="wanted a finite number"):
        CODECS["onebit"].decode(np.frombuffer(damaged, np.uint8), np.zeros(NUMEL, np.float32))


def test_a_payload_of_other_parameters_or_another_size_says_so():
    narrow, wide = make_codec("terngrad", bitwidth=2), make_codec("terngrad", bitwidth=4)
    out = np.zeros(wide.max_nbytes(NUMEL), np.uint8)
    nbytes = wide.encode(np.ones(NUMEL, np.float32), None, out)
    with pytest.raises(CodecError, match=r"payload of terngrad\(4\); wanted terngrad\(bitwidth=2\)"):
        narrow.decode(out[:nbytes], np.zeros(NUMEL, np.float32))
    with pytest.raises(CodecError, match="payload of 257 elements; wanted 256: it belongs to another tensor"):
        wide.decode(out[:nbytes], np.zeros(NUMEL - 1, np.float32))
