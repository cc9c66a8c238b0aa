"""Codecs write and read inside the memory they are given, and encode nothing that no receiver would take."""

import signal
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from penstock.codecs.feedback import Residual
from penstock.codecs.header import MAX_NUMEL, Header, pack_header
from penstock.codecs.registry import codec_names, make_codec
from penstock.codecs.sparse.sparse_codec import SparseCodec
from penstock.errors import CodecError
from python_codecs import Int8

VALUES = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
GUARD = 0xA5


@pytest.mark.parametrize("index_form", ["int32", "gaps", "smaller"])
@pytest.mark.parametrize("value_bits", [16, 32])
@pytest.mark.parametrize("missing", [1, 100, "all"])
def test_a_sparse_block_is_not_written_past_the_end_of_its_room(index_form, value_bits, missing):
    codec = SparseCodec(0.25, value_bits, index_form)
    needed = codec.max_nbytes(VALUES.size)
    memory = np.full(needed + 4096, GUARD, np.uint8)
    room = memory[: 0 if missing == "all" else needed - missing]
    residual = np.zeros(VALUES.size, np.float32)
    with pytest.raises(CodecError, match=f"room for {room.size} bytes; wanted {needed}"):
        codec.encode(VALUES, residual, room)
    assert (memory == GUARD).all()
    assert not residual.any()


def test_a_sparse_merge_needs_room_for_its_result():
    codec = SparseCodec(0.25)
    one, other = (np.zeros(codec.max_nbytes(VALUES.size), np.uint8) for _ in range(2))
    codec.encode(VALUES, None, one)
    codec.encode(-VALUES[::-1].copy(), None, other)
    with pytest.raises(CodecError, match="room for"):
        codec.merge(other, one[:-1], None)


def test_a_gradient_that_decode_would_refuse_is_not_encoded():
    codec, numel = make_codec("onebit"), MAX_NUMEL + 8
    assert codec.max_nbytes(MAX_NUMEL) > MAX_NUMEL // 8
    with pytest.raises(CodecError, match=f"{numel} elements; a payload holds at most {MAX_NUMEL}: split the tensor"):
        codec.max_nbytes(numel)


@pytest.mark.parametrize("name", [*codec_names(), "sparse(density=0.1)"])
@pytest.mark.parametrize("numel", [0, 1, 1000])
def test_a_payload_of_a_few_bytes_is_refused(name, numel):
    codec, out = make_codec(name), np.zeros(numel, np.float32)
    for nbytes in range(60):
        payload = np.zeros(nbytes, np.uint8)
        bound = [codec.bind_decode(payload, out, adds) for adds in (False, True)]
        for decode in (lambda: codec.decode(payload, out), lambda: codec.decode_add(payload, out), *bound):  # noqa: B023
            with pytest.raises(CodecError):
                decode()


@pytest.mark.parametrize("name", codec_names())
def test_programs_cannot_encode_into_memory_that_is_too_short(name):
    codec = make_codec(name)
    memory = np.full(codec.max_nbytes(VALUES.size) + 4096, GUARD, np.uint8)
    short = memory[: codec.max_nbytes(VALUES.size) - 1]
    with pytest.raises(CodecError, match="room for"):
        codec.bind_encode_into(VALUES, None)(short)
    with pytest.raises(CodecError, match="room for"):
        codec.bind_encode(VALUES, Residual(np.zeros_like(VALUES)), short)()
    assert (memory == GUARD).all()


@pytest.mark.parametrize("nbytes", [0, 1, 3, 100])
def test_a_body_that_a_users_codec_cannot_decode_is_a_codec_error(nbytes):
    codec, out = Int8(), np.zeros(200, np.float32)
    packed = pack_header(Header(codec.name, (), out.size, nbytes))
    payload = np.frombuffer(packed + bytes(nbytes), np.uint8)
    for decode in (codec.decode, codec.decode_add):
        with pytest.raises(CodecError, match=f"decode_body takes no body of {nbytes} bytes for 200 elements"):
            decode(payload, out)


@pytest.mark.parametrize("letters", [b"a\nb", b"\x1b[2J", bytes(range(128, 144))])
def test_errors_show_no_control_characters_of_a_damaged_header(letters):
    packed = bytearray(pack_header(Header("onebit", (), 8, 1)))
    packed[24:40] = letters.ljust(16, b"\0")
    packed[-4:] = zlib.crc32(packed[:-4]).to_bytes(4, "little")
    with pytest.raises(CodecError) as raised:
        make_codec("onebit").decode(np.frombuffer(bytes(packed) + b"\0", np.uint8), np.zeros(8, np.float32))
    assert str(raised.value).isprintable()
    assert str(raised.value).isascii()


GUARDED = """
import sys
sys.path.insert(0, sys.argv[1])
from damaged_payloads import Guarded
memory = Guarded(5000)
taken = memory.take(100, sys.argv[2] == "end")
taken[:] = 1
assert memory.is_intact
print("alive", flush=True)
import ctypes
address = taken.ctypes.data + (100 if sys.argv[2] == "end" else -1)
ctypes.c_char.from_address(address).value
"""


@pytest.mark.parametrize("side", ["end", "beginning"])
def test_the_campaign_sees_a_read_of_one_byte_too_far(side):
    soak = Path(__file__).parents[2] / "benchmarks" / "soak"
    ran = subprocess.run([sys.executable, "-c", GUARDED, str(soak), side], capture_output=True, text=True, timeout=300)
    assert (ran.stdout, ran.returncode) == ("alive\n", -signal.SIGSEGV), ran.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_part_of_the_campaign_of_damage_finds_nothing(tmp_path):
    script = Path(__file__).parents[2] / "benchmarks" / "soak" / "damage.py"
    command = [sys.executable, str(script), "--count", "20000", "--files", "2000", "--out", str(tmp_path / "r.json")]
    ran = subprocess.run([*command, "--seed", "7"], capture_output=True, text=True, timeout=1400)
    assert ran.returncode == 0, ran.stdout[-500:] + ran.stderr[-2000:]
