"""The payload header: round trips, and every way of damaging one is refused with a message that says what it was."""

import doctest
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.codecs import header
from penstock.codecs.header import Header, pack_header, parse_header
from penstock.errors import CodecError

HEADERS = st.builds(
    Header,
    codec=st.text("abcdefghijklmnopqrstuvwxyz0123456789_", min_size=1, max_size=16),
    parameters=st.lists(st.floats(allow_nan=False), max_size=16).map(tuple),
    numel=st.integers(0, header.MAX_NUMEL),
    body_nbytes=st.integers(0, 2**64 - 1),
    flags=st.integers(0, 3),
)
ONEBIT = Header("onebit", (2.0,), 1000, 129)


@given(HEADERS, st.binary(max_size=40))
def test_a_header_comes_back_as_it_was_whatever_follows_it(written, body):
    assert parse_header(pack_header(written) + body) == written


@given(HEADERS)
def test_the_body_keeps_the_alignment_of_the_buffer(written):
    assert len(pack_header(written)) == written.nbytes
    assert written.nbytes % 16 == 0


@given(HEADERS, st.data())
def test_any_flipped_bit_is_noticed(written, data):
    damaged = bytearray(pack_header(written))
    bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CodecError):
        parse_header(bytes(damaged))


@given(HEADERS, st.data())
def test_any_cut_header_is_noticed(written, data):
    whole = pack_header(written)
    with pytest.raises(CodecError, match=r"cut short|damaged"):
        parse_header(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_cleanly(garbage):
    with pytest.raises(CodecError):
        parse_header(garbage)


def test_the_layout_is_the_documented_one():
    packed = pack_header(ONEBIT)
    assert packed[:8] == b"PNSK\x01\x01\x00\x00"
    assert packed[8:24] == (1000).to_bytes(8, "little") + (129).to_bytes(8, "little")
    assert packed[24:40] == b"onebit".ljust(16, b"\0")
    assert packed[40:48] == bytes.fromhex("0000000000000040")
    assert len(packed) == 64


def with_byte(position, value):
    damaged = bytearray(pack_header(ONEBIT))
    damaged[position] = value
    return bytes(damaged)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "payload of 0 bytes; wanted at least 40: it was cut short"),
        (b"x" * 64, "payload begins with b'xxxx'; wanted b'PNSK': these bytes are not from a penstock codec"),
        (with_byte(4, 9), "header version 9; wanted 1: use the same penstock on all ranks"),
        (with_byte(5, 200), "header with 200 parameters in a payload of 64 bytes: it is damaged"),
        (with_byte(8, 1), "wanted 0x.*: bytes changed on the way"),
        (pack_header(Header("onebit", (), 1, 1, flags=4)), "flags 0x4 and"),
        (pack_header(Header("onebit", (), 2**31, 0)), "header with 2147483648 elements"),
    ],
)
def test_messages_say_what_was_found_and_what_was_wanted(payload, message):
    with pytest.raises(CodecError, match=message):
        parse_header(payload)


def test_nan_parameters_survive_so_that_the_codec_can_name_them():
    parsed = parse_header(pack_header(Header("tbq", (math.nan,), 1, 1)))
    assert math.isnan(parsed.parameters[0])


def test_examples_in_the_docstrings_hold():
    assert doctest.testmod(header).failed == 0
