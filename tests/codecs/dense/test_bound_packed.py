"""Calls for payloads that differ in size, on values that stay, do what the usual ones do, to the bit."""

from dataclasses import replace
from functools import cache
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.codecs.dense import bound_packed
from penstock.codecs.dense.codec import Codec
from penstock.codecs.registry import make_codec
from penstock.codecs.wire import WireCodec
from penstock.errors import CodecError, NonFiniteError
from penstock.runtime.packed import decode_packed, encode_packed, filled_nbytes, packed_decode, packed_encode

VARYING = ["topk(density=0.05)", "dgc(density=0.05)", "graddrop(density=0.05)", "adacomp", "3lc"]


@cache
def compiled(name: str) -> Codec:
    """Return a codec for all tests; loading its kernels takes longer than using them here."""
    return make_codec(name)


def wire(name: str) -> WireCodec:
    return WireCodec(replace(compiled(name), seed=7, _calls=count()))


class Usual:
    """A codec without calls that are bound."""

    def __init__(self, codec: WireCodec) -> None:
        self.encode, self.decode, self.decode_add = codec.encode, codec.decode, codec.decode_add
        self.payload_nbytes = codec.payload_nbytes


@pytest.mark.parametrize("name", VARYING)
@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=8), feeds_back=st.booleans(), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=5)
def test_a_batch_of_bound_calls_makes_and_reads_the_bytes_of_calls_for_each_tensor(name, sizes, feeds_back, seed):
    rng, ends = np.random.default_rng(seed), np.cumsum(sizes)
    codecs = [wire(name), Usual(wire(name))]
    room = sum(-(-compiled(name).max_nbytes(size) // 16) * 16 for size in sizes)
    blocks = [np.zeros(room, np.uint8) for _ in codecs]
    gradients, residuals, totals = ([np.zeros(sum(sizes), np.float32) for _ in codecs] for _ in range(3))
    encodes, writes, adds = [], [], []
    for codec, gradient, residual, total in zip(codecs, gradients, residuals, totals, strict=True):
        pieces = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        encodes.append([packed_encode(codec, gradient[at], residual[at] if feeds_back else None) for at in pieces])
        writes.append([packed_decode(codec, total[at], False) for at in pieces])
        adds.append([packed_decode(codec, total[at], True) for at in pieces])
    for step in range(4):
        values = rng.standard_normal(sum(sizes), np.float32) * rng.choice([0.0, 1.0], sum(sizes))
        for index, codec in enumerate(codecs):
            gradients[index][:] = values
            encode_packed(encodes[index], blocks[index])
            decode_packed((adds if step else writes)[index], blocks[index])
            assert 0 < filled_nbytes(codec, len(sizes), blocks[index]) <= room
        assert blocks[0].tobytes() == blocks[1].tobytes()
        assert residuals[0].tobytes() == residuals[1].tobytes()
        assert totals[0].tobytes() == totals[1].tobytes()


def ready(name: str = "topk(density=0.05)", numel: int = 64):
    codec, gradient = wire(name), np.arange(1, numel + 1, dtype=np.float32)
    payload, out = np.zeros(codec.max_nbytes(numel), np.uint8), np.zeros(numel, np.float32)
    return codec, gradient, payload, out


def test_a_gradient_that_is_not_finite_says_so_in_its_payload_and_to_whoever_checks() -> None:
    codec, gradient, payload, out = ready()
    encode, decode = codec.bound_encode_into(gradient, None), codec.bound_decode_from(out, True)
    for value in (1.0, np.inf, 1.0):
        gradient[3] = value
        assert encode(payload) == decode(payload)
        assert np.isnan(out).all() == (not np.isfinite(value))
        out[:] = 0
    with pytest.raises(
        NonFiniteError, match='the gradient holds NaN or infinity; fix the loss, or pass on_nonfinite="sk'
    ):
        codec.check()


def test_a_damaged_payload_is_refused_as_usual_whether_its_header_is_known_or_not() -> None:
    codec, gradient, payload, out = ready()
    encode, decode = codec.bound_encode_into(gradient, None), codec.bound_decode_from(out, False)
    with pytest.raises(CodecError, match="not from a penstock codec"):
        decode(payload)
    nbytes = encode(payload)
    assert decode(payload) == nbytes
    payload[codec.codec.header_nbytes : nbytes] = 0xFF
    messages = []
    for call in (lambda: decode(payload), lambda: codec.decode(payload, out)):
        with pytest.raises(CodecError) as caught:
            call()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_headers_of_many_sizes_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_packed, "KEPT", 2)
    codec, gradient, payload, out = ready("graddrop(density=0.5)")
    encode, decode = codec.bound_encode_into(gradient, None), codec.bound_decode_from(out, False)
    for numel in (3, 9, 30, 60, 3):
        gradient[:] = 0
        gradient[:numel] = np.arange(1, numel + 1)
        assert encode(payload) == decode(payload)
        usual = np.zeros_like(out)
        codec.decode(payload, usual)
        np.testing.assert_array_equal(out, usual)
    kept = [cell.cell_contents for call in (encode, decode) for cell in call.__closure__]
    assert sorted(len(each) for each in kept if isinstance(each, dict)) == [2, 2]


def test_16_bits_and_steps_that_may_be_skipped_go_the_usual_way() -> None:
    codec, gradient, _, _ = ready()
    halves = gradient.astype(np.float16)
    assert codec.bound_encode_into(halves, None) is None
    assert codec.bound_encode_into(gradient[:0], None) is None
    assert codec.bound_decode_from(halves, True) is None
    skipping = WireCodec(replace(codec.codec, on_nonfinite="skip"))
    assert skipping.bound_encode_into(gradient, None) is None
