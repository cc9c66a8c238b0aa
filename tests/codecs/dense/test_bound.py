"""Calls on memory that stays do what the usual ones do, to the bit, and leave what is unusual to them."""

from dataclasses import replace
from functools import cache
from itertools import accumulate, count, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.codecs.codec import Decoded, Encoded, HeaderCodec
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


SIZES = (1, 64, 7, 300, 129)
PLACES = list(pairwise(accumulate(SIZES, initial=0)))
NOWHERE = (None,) * len(SIZES)


class Pieces:
    """Gradients of several pieces, each with a residual, a payload and a sum, and a codec for them."""

    def __init__(self, name: str) -> None:
        self.codec, numel = make_codec(name, seed=7, on_nonfinite="note"), sum(SIZES)
        self.gradient, self.total = np.zeros(numel, np.float32), np.zeros(numel, np.float32)
        self.residual = DeferredResidual(np.zeros(numel, np.float32))
        self.payloads = [np.zeros(self.codec.max_nbytes(size), np.uint8) for size in SIZES]

    def to_encode(self, sources=NOWHERE) -> list[Encoded]:
        """Return all pieces; the one in the middle is scaled."""
        return [
            Encoded(self.gradient[a:b], self.residual.piece(a, b, 0.25 if b - a == 7 else 1.0), payload, source)
            for (a, b), payload, source in zip(PLACES, self.payloads, sources, strict=True)
        ]

    def to_decode(self, sources=NOWHERE, factor: float = 2.0) -> list[Decoded]:
        """Return all pieces of the sum."""
        pieces = zip(PLACES, self.payloads, sources, strict=True)
        return [Decoded(payload, self.total[a:b], factor, source) for (a, b), payload, source in pieces]

    def state(self) -> tuple[bytes, ...]:
        """Return all bytes of it."""
        return (*(each.tobytes() for each in self.payloads), self.total.tobytes(), self.residual.values().tobytes())


@pytest.mark.parametrize(
    "name", ["onebit", "terngrad", "tbq", "fp8", "qsgd(bits=8)", "blocks(bits=4)", "onebit(block=64)"]
)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_one_call_for_all_pieces_does_what_a_call_for_each_does(name: str, elsewhere: bool) -> None:
    together, each = Pieces(name), Pieces(name)
    values, rng = np.zeros_like(together.gradient), np.random.default_rng(1)
    sources = [(lambda a=a, b=b: values[a:b]) if elsewhere else None for a, b in PLACES]
    encode = together.codec.bind_encodes(together.to_encode(sources))
    add = together.codec.bind_decodes(together.to_decode(sources), True)
    for _ in range(4):
        values[:] = rng.standard_normal(values.size, np.float32)
        together.gradient[:], each.gradient[:] = np.nan if elsewhere else values, values
        encode()
        for piece in each.to_encode():
            each.codec.encode(*piece[:3])
        add()
        if elsewhere:
            each.total[:] = values
        for piece in each.to_decode():
            each.codec.decode_add(piece.payload, piece.out, 2.0)
        assert together.payloads[3].tobytes() == each.payloads[3].tobytes()
    assert together.state() == each.state()
    together.codec.bind_decodes(together.to_decode(), False)()
    for piece in each.to_decode():
        each.codec.decode(piece.payload, piece.out)
    assert together.state() == each.state()


@pytest.mark.parametrize("name", ["onebit", "blocks(bits=4)"])
def test_a_piece_that_is_not_finite_leaves_the_others_what_they_are(name: str) -> None:
    found, wanted = Pieces(name), Pieces(name)
    encode = found.codec.bind_encodes(found.to_encode())
    calls = [wanted.codec.bind_encode(*piece[:3]) for piece in wanted.to_encode()]
    rng = np.random.default_rng(2)
    for step in range(5):
        found.gradient[:] = wanted.gradient[:] = rng.standard_normal(found.gradient.size, np.float32)
        if step == 2:
            found.gradient[70] = wanted.gradient[70] = np.inf
        encode()
        for call in calls:
            call()
        assert [each.tobytes() for each in found.payloads] == [each.tobytes() for each in wanted.payloads]
        assert found.codec.saw_nonfinite() == (step == 2)
        if step == 2:
            found.codec.bind_decodes(found.to_decode(), False)()
            places = slice(*PLACES[2])
            assert np.isnan(found.total[places]).all()
            assert np.isfinite(np.delete(found.total, np.r_[places])).all()
            for each in (found, wanted):  # what is left of that piece is of no use
                each.residual.values()[places] = 0.0
                each.codec.saw_nonfinite()


def test_a_damaged_piece_is_refused_as_by_itself() -> None:
    pieces = Pieces("onebit")
    pieces.codec.bind_encodes(pieces.to_encode())()
    decode = pieces.codec.bind_decodes(pieces.to_decode(), True)
    pieces.payloads[3][pieces.codec.header_nbytes] ^= 1  # how many bits of the last byte are not used
    with pytest.raises(CodecError) as together:
        decode()
    with pytest.raises(CodecError) as alone:
        pieces.codec.decode_add(pieces.payloads[3], np.zeros(SIZES[3], np.float32))
    assert str(together.value) == str(alone.value)


@pytest.mark.parametrize(
    "make",
    [lambda values: values.astype(np.float64), lambda values: np.repeat(values, 2)[::2]],
    ids=["of another type", "not contiguous"],
)
def test_values_elsewhere_that_kernels_cannot_read_are_copied_first(make) -> None:
    found, wanted = Pieces("onebit"), Pieces("onebit")
    values = np.random.default_rng(3).standard_normal(found.gradient.size, np.float32)
    sources = [(lambda a=a, b=b: make(values[a:b])) for a, b in PLACES]
    wanted.gradient[:] = values
    encode, usual = found.codec.bind_encodes(found.to_encode(sources)), wanted.codec.bind_encodes(wanted.to_encode())
    for _ in range(3):
        encode()
        usual()
    assert found.state() == wanted.state()


def test_a_payload_too_short_for_its_piece_is_refused_before_anything_is_written() -> None:
    pieces = Pieces("onebit")
    short = [piece._replace(out=piece.out[:-1]) if piece.values.size == 300 else piece for piece in pieces.to_encode()]
    with pytest.raises(CodecError, match="room for"):
        pieces.codec.bind_encodes(short)
    pieces.codec.bind_encodes(pieces.to_encode())()
    cut = [each._replace(payload=each.payload[:-1]) if each.out.size == 300 else each for each in pieces.to_decode()]
    with pytest.raises(CodecError, match="cut short"):
        pieces.codec.bind_decodes(cut, True)()


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
    halves = values.astype(np.float16)
    assert bound.encodes(codec, [Encoded(values, values.copy(), payload)]) is None
    assert bound.encodes(codec, [Encoded(halves, Residual(values.copy()), payload)]) is None
    assert bound.decodes(codec, [None], [Decoded(payload, halves)], False) is None
    assert bound.decodes(make_codec("graddrop"), [None], [Decoded(payload, values)], True) is None


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
