"""Calls on memory that stays do what the usual ones do, to the bit, and leave what is unusual to them."""

import numpy as np
import pytest

from penstock.codecs.feedback import PutOff, Residual
from penstock.codecs.registry import make_codec
from penstock.codecs.wire import WireCodec
from penstock.errors import CodecError

NUMEL = 1001


@pytest.mark.parametrize("name", ["onebit", "terngrad", "tbq", "signsgd", "fp8", "qsgd(bits=8)", "blocks"])
def test_bound_calls_make_and_read_the_same_bytes(name: str) -> None:
    quick, usual = (WireCodec(make_codec(name, seed=7)) for _ in range(2))
    rng, gradient = np.random.default_rng(0), np.zeros(NUMEL, np.float32)
    payloads = [np.zeros(quick.max_nbytes(NUMEL), np.uint8) for _ in range(2)]
    kept = [PutOff(np.zeros(NUMEL, np.float32)).piece(0, NUMEL, 0.5) for _ in range(2)]
    totals = [np.zeros(NUMEL, np.float32) for _ in range(2)]
    encode = quick.bound_encode(gradient, kept[0], payloads[0])
    decodes = [quick.bound_decode(payloads[0], totals[0], adds) for adds in (False, True)]
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
    codec, gradient = WireCodec(make_codec("onebit")), np.ones(64, np.float32)
    payload, out = np.zeros(codec.max_nbytes(64), np.uint8), np.zeros(64, np.float32)
    encode = codec.bound_encode(gradient, Residual(np.zeros(64, np.float32)), payload)
    decode = codec.bound_decode(payload, out, False)
    for value in (1.0, 1.0, np.inf):
        gradient[3] = value
        encode()
    decode()
    assert np.isnan(out).all()


def test_so_does_a_residual_that_is_not_finite() -> None:
    codec, gradient = WireCodec(make_codec("onebit")), np.ones(64, np.float32)
    payload, out = np.zeros(codec.max_nbytes(64), np.uint8), np.zeros(64, np.float32)
    residual = Residual(np.zeros(64, np.float32), factor=0.5)
    encode = codec.bound_encode(gradient, residual, payload)
    encode()
    residual.memory[3] = np.nan
    encode()
    codec.bound_decode(payload, out, False)()
    assert np.isnan(out).all()


def test_a_damaged_payload_is_refused_as_usual() -> None:
    codec, out = WireCodec(make_codec("onebit")), np.zeros(64, np.float32)
    payload = np.zeros(codec.max_nbytes(64), np.uint8)
    decode = codec.bound_decode(payload, out, False)
    with pytest.raises(CodecError, match="not from a penstock codec"):
        decode()


def test_what_varies_or_is_not_float32_or_subtracts_at_once_is_not_bound() -> None:
    codec, values = WireCodec(make_codec("onebit")), np.ones(64, np.float32)
    payload = np.zeros(4096, np.uint8)
    assert codec.bound_encode(values, values.copy(), payload) is None
    assert codec.bound_encode(values.astype(np.float16), Residual(values.copy()), payload) is None
    assert codec.bound_decode(payload, values.astype(np.float16), False) is None
    assert WireCodec(make_codec("graddrop")).bound_decode(payload, values, True) is None
