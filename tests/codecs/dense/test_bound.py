"""Calls on memory that stays do what the usual ones do, to the bit, and leave what is unusual to them."""

from dataclasses import replace
from functools import cache
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.codecs.codec import HeaderCodec
from penstock.codecs.dense import bound
from penstock.codecs.dense.dense_codec import DenseCodec
from penstock.codecs.feedback import DeferredResidual, Residual
from penstock.codecs.registry import make_codec
from penstock.errors import CodecError, NonFiniteError
from penstock.runtime.binding import _call_packed, _filled_nbytes

NUMEL = 1001


@pytest.mark.parametrize("name", ["onebit", "terngrad", "tbq", "signsgd", "fp8", "qsgd(bits=8)", "blocks"])
def test_bound_calls_make_and_read_the_same_bytes(name: str) -> None:
    quick, usual = (make_codec(name, seed=7) for _ in range(2))
    rng, gradient = np.random.default_rng(0), np.zeros(NUMEL, np.float32)
    payloads = [np.zeros(quick.max_nbytes(NUMEL), np.uint8) for _ in range(2)]
    kept = [DeferredResidual(np.zeros(NUMEL, np.float32)).piece(0, NUMEL, 0.5) for _ in range(2)]
    totals = [np.zeros(NUMEL, np.float32) for _ in range(2)]
    encode = quick.bind_encode(gradient, kept[0], payloads[0])
    decodes = [quick.bind_decode(payloads[0], totals[0], adds) for adds in (False, True)]
    for step in range(4):
        gradient[:] = rng.standard_normal(NUMEL, np.float32)
        encode()
        usual.encode(gradient, kept[1], payloads[1])
        assert payloads[0].tobytes() == payloads[1].tobytes()
        decodes[step > 0]()
        (usual.decode_add if step else usual.decode)(payloads[1], totals[1])
        assert totals[0].tobytes() == totals[1].tobytes()
    assert kept[0].values().tobytes() == kept[1].values().tobytes()


def test_a_gradient_that_is_not_finite_goes_the_usual_way() -> None:
    codec, gradient = make_codec("onebit"), np.ones(64, np.float32)
    payload, out = np.zeros(codec.max_nbytes(64), np.uint8), np.zeros(64, np.float32)
    encode = codec.bind_encode(gradient, Residual(np.zeros(64, np.float32)), payload)
    decode = codec.bind_decode(payload, out, False)
    for value in (1.0, 1.0, np.inf):
        gradient[3] = value
        encode()
    decode()
    assert np.isnan(out).all()


def test_so_does_a_residual_that_is_not_finite() -> None:
    codec, gradient = make_codec("onebit"), np.ones(64, np.float32)
    payload, out = np.zeros(codec.max_nbytes(64), np.uint8), np.zeros(64, np.float32)
    residual = Residual(np.zeros(64, np.float32), factor=0.5)
    encode = codec.bind_encode(gradient, residual, payload)
    encode()
    residual.memory[3] = np.nan
    encode()
    codec.bind_decode(payload, out, False)()
    assert np.isnan(out).all()


def test_a_damaged_payload_is_refused_as_usual() -> None:
    codec, out = make_codec("onebit"), np.zeros(64, np.float32)
    payload = np.zeros(codec.max_nbytes(64), np.uint8)
    decode = codec.bind_decode(payload, out, False)
    with pytest.raises(CodecError, match="not from a penstock codec"):
        decode()


def test_what_varies_or_is_not_float32_or_subtracts_at_once_is_not_bound() -> None:
    codec, values = make_codec("onebit"), np.ones(64, np.float32)
    payload = np.zeros(4096, np.uint8)
    assert bound.encode(codec, values, values.copy(), payload) is None
    assert bound.encode(codec, values.astype(np.float16), Residual(values.copy()), payload) is None
    assert bound.decode(codec, None, payload, values.astype(np.float16), False, 1.0) is None
    assert bound.decode(make_codec("graddrop"), None, payload, values, True, 1.0) is None


# Payloads that differ in size

VARYING = ["topk(density=0.05)", "dgc(density=0.05)", "graddrop(density=0.05)", "adacomp", "3lc"]


@cache
def compiled(name: str) -> DenseCodec:
    """Return a codec for all tests; loading its kernels takes longer than using them here."""
    return make_codec(name)


def fresh(name: str) -> DenseCodec:
    return replace(compiled(name), seed=7, _calls=count())


def decode_from(kind, codec, out, adds):
    """Return the codec's bound call, or for `HeaderCodec` one that goes the usual way."""
    if kind is DenseCodec:
        return codec.bind_decode_from(out, adds)

    def usual(payload):
        HeaderCodec.bind_decode(codec, payload, out, adds)()
        return codec.payload_nbytes(payload)

    return usual


@pytest.mark.parametrize("name", VARYING)
@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=8), feeds_back=st.booleans(), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=5)
def test_a_batch_of_bound_calls_makes_and_reads_the_bytes_of_calls_for_each_tensor(name, sizes, feeds_back, seed):
    rng, ends = np.random.default_rng(seed), np.cumsum(sizes)
    codecs, kinds = [fresh(name), fresh(name)], (DenseCodec, HeaderCodec)  # of the latter: the usual calls
    room = sum(-(-compiled(name).max_nbytes(size) // 16) * 16 for size in sizes)
    blocks = [np.zeros(room, np.uint8) for _ in codecs]
    gradients, residuals, totals = ([np.zeros(sum(sizes), np.float32) for _ in codecs] for _ in range(3))
    encodes, writes, adds = [], [], []
    for kind, codec, gradient, residual, total in zip(kinds, codecs, gradients, residuals, totals, strict=True):
        pieces = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        kept = [residual[at] if feeds_back else None for at in pieces]
        encodes.append(
            [kind.bind_encode_into(codec, gradient[at], each) for at, each in zip(pieces, kept, strict=True)]
        )
        writes.append([decode_from(kind, codec, total[at], False) for at in pieces])
        adds.append([decode_from(kind, codec, total[at], True) for at in pieces])
    for step in range(4):
        values = rng.standard_normal(sum(sizes), np.float32) * rng.choice([0.0, 1.0], sum(sizes))
        for index, codec in enumerate(codecs):
            gradients[index][:] = values
            _call_packed(encodes[index], blocks[index])
            _call_packed((adds if step else writes)[index], blocks[index])
            assert 0 < _filled_nbytes(codec.payload_nbytes, len(sizes), blocks[index], 0) <= room
        assert blocks[0].tobytes() == blocks[1].tobytes()
        assert residuals[0].tobytes() == residuals[1].tobytes()
        assert totals[0].tobytes() == totals[1].tobytes()


def ready(name: str = "topk(density=0.05)", numel: int = 64):
    codec, gradient = fresh(name), np.arange(1, numel + 1, dtype=np.float32)
    payload, out = np.zeros(codec.max_nbytes(numel), np.uint8), np.zeros(numel, np.float32)
    return codec, gradient, payload, out


def test_a_gradient_that_is_not_finite_says_so_in_its_payload_and_is_raised_by_a_check() -> None:
    codec, gradient, payload, out = ready()
    encode, decode = codec.bind_encode_into(gradient, None), codec.bind_decode_from(out, True)
    for value in (1.0, np.inf, 1.0):
        gradient[3] = value
        assert encode(payload) == decode(payload)
        assert np.isnan(out).all() == (not np.isfinite(value))
        out[:] = 0
    with pytest.raises(
        NonFiniteError, match='the gradient holds NaN or infinity; fix the loss, or pass on_nonfinite="sk'
    ):
        codec.check_finite()


def test_a_damaged_payload_of_any_size_is_refused_as_usual_whether_its_header_is_known_or_not() -> None:
    codec, gradient, payload, out = ready()
    encode, decode = codec.bind_encode_into(gradient, None), codec.bind_decode_from(out, False)
    with pytest.raises(CodecError, match="not from a penstock codec"):
        decode(payload)
    nbytes = encode(payload)
    assert decode(payload) == nbytes
    payload[codec.header_nbytes : nbytes] = 0xFF
    messages = []
    for call in (lambda: decode(payload), lambda: codec.decode(payload[:nbytes], out)):
        with pytest.raises(CodecError) as caught:
            call()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_headers_of_many_sizes_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound, "KEPT", 2)
    codec, gradient, payload, out = ready("graddrop(density=0.5)")
    encode, decode = codec.bind_encode_into(gradient, None), codec.bind_decode_from(out, False)
    for numel in (3, 9, 30, 60, 3):
        gradient[:] = 0
        gradient[:numel] = np.arange(1, numel + 1)
        assert encode(payload) == decode(payload)
        usual = np.zeros_like(out)
        codec.decode(payload[: codec.payload_nbytes(payload)], usual)
        np.testing.assert_array_equal(out, usual)
    kept = [cell.cell_contents for call in (encode, decode) for cell in call.__closure__]
    assert sorted(len(each) for each in kept if isinstance(each, dict)) == [2, 2]


def test_16_bits_and_steps_that_may_be_skipped_go_the_usual_way() -> None:
    codec, gradient, _, _ = ready()
    halves = gradient.astype(np.float16)
    assert bound.encode_into(codec, halves, None) is None
    assert bound.encode_into(codec, gradient[:0], None) is None
    assert bound.decode_from(codec, None, halves, True) is None
    assert bound.encode_into(replace(codec, on_nonfinite="skip"), gradient, None) is None
