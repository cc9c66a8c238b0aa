"""Codecs write and read inside the memory they are given, and encode nothing that no receiver would take."""

import numpy as np
import pytest

from penstock.codecs.header import MAX_NUMEL
from penstock.codecs.registry import codec_names, make_codec
from penstock.codecs.sparse.sparse_codec import SparseCodec
from penstock.errors import CodecError

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
