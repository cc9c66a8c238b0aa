"""Kernels for many pieces write what kernels for one write, to the bit; interpreted where there is no GPU."""

import os
from itertools import accumulate

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
pytest.importorskip("triton", reason="install penstock[gpu] to test kernels for the GPU")

from penstock.codecs.dense.device_codec import DeviceCodec  # noqa: E402
from penstock.codecs.registry import codec_names, make_codec  # noqa: E402
from penstock.compll.backends.triton.many import Batch, ManyKernels, qualifies  # noqa: E402

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
PIECES = [(0, 700), (704, 1800), (1801, 1809), (1809, 6500)]
VARYING = {"3lc", "adacomp", "dgc", "graddrop", "topk"}
SEED = (3 << 32) + 5


class Case:
    """A codec on the device, its kernels for many pieces, and memory for two payloads of each."""

    def __init__(self, spec):
        self.codec = make_codec(spec, 3)
        self.device = DeviceCodec.create(self.codec, DEVICE)
        kernels = self.device.kernels.kernels
        self.many = ManyKernels(kernels, self.codec.arguments, self.device.kernels.status)
        sizes = [stop - start for start, stop in PIECES]
        self.nbytes = [self.codec.max_nbytes(size) for size in sizes]
        self.places = [*accumulate((-(-nbytes // 16) * 16 for nbytes in self.nbytes), initial=0)]
        self.half = self.places.pop()
        self.payloads = torch.zeros(2 * self.half, dtype=torch.uint8, device=DEVICE)
        headers, skipped = ([self.device.header(size, flag) for size in sizes] for flag in (False, True))
        second = [place + self.half for place in self.places]
        ordinals = [7, 8, 9, 10]
        self.batches = [
            Batch(PIECES, places, ordinals, headers, skipped, kernels)
            for places in ([self.places], [second], [self.places, second])
        ]

    def encode(self, which, gradient, residual):
        batch = self.batches[which]
        self.many.encoder(batch, gradient, residual, self.payloads).start(SEED)
        self.many.marker(batch, self.payloads).start()

    def payload(self, which, piece):
        start = self.places[piece] + which * self.half
        return self.payloads[start : start + self.nbytes[piece]]


def values(seed):
    return torch.randn(PIECES[-1][1], generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def qualified():
    return [spec for spec in codec_names() if qualifies(DeviceCodec.create(make_codec(spec), DEVICE).kernels.kernels)]


def test_all_codecs_with_payloads_of_one_size_qualify_by_block_too():
    assert VARYING & set(qualified()) == set()
    assert set(codec_names()) - VARYING <= set(qualified())
    by_block = DeviceCodec.create(make_codec("onebit(block=256)"), DEVICE).kernels.kernels
    assert qualifies(by_block)
    assert len(by_block.encode) == 1  # means are made by the kernel that packs the signs
    assert by_block.settles


@pytest.mark.parametrize(
    "spec",
    ["onebit", "terngrad", "bf16", "blocks(bits=4)", "onebit(block=256)"]
    + [pytest.param(spec, marks=pytest.mark.slow) for spec in ("fp8", "blocks(bits=2)", "blocks(bits=8)", "qsgd")],
)
def test_payloads_residuals_and_sums_are_those_of_each_piece_by_itself(spec):
    case, gradient, other = Case(spec), values(1), values(2)
    residual, expected = values(3) / 8, values(3) / 8
    case.encode(0, gradient, residual)
    case.encode(1, other, None)
    total, wanted = torch.zeros_like(gradient), torch.zeros_like(gradient)
    case.many.decoder(case.batches[2], case.payloads, total, False).start()
    for piece, (start, stop) in enumerate(PIECES):
        for which, (source, kept) in enumerate(((gradient, expected[start:stop]), (other, None))):
            payload = torch.zeros(case.nbytes[piece], dtype=torch.uint8, device=DEVICE)
            case.device.encode(source[start:stop].clone(), kept, payload, SEED + 7 + piece)
            assert torch.equal(payload, case.payload(which, piece))
            case.device.decode(payload, wanted[start:stop], 1.0 if which else None)
    for start, stop in PIECES:
        assert torch.equal(residual[start:stop], expected[start:stop])
        assert torch.equal(total[start:stop], wanted[start:stop])
    assert total[700:704].eq(0).all()  # between pieces
    assert case.device.kernels.status.item() == 0


def test_a_piece_that_is_not_finite_decodes_to_nan_and_leaves_the_others_alone():
    case, gradient, out = Case("onebit"), values(1), values(2)
    gradient[900] = float("inf")
    case.encode(0, gradient, None)
    case.encode(1, values(3), None)
    case.many.decoder(case.batches[2], case.payloads, out, True).start()
    assert [bool(out[start:stop].isnan().all()) for start, stop in PIECES] == [False, True, False, False]
    assert sum(out[start:stop].isfinite().all().item() for start, stop in PIECES) == 3
    case.encode(0, values(4), None)  # the flag is down again
    case.many.decoder(case.batches[0], case.payloads, out, False).start()
    assert all(out[start:stop].isfinite().all() for start, stop in PIECES)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
def test_kernels_are_compiled_before_the_first_launch_and_the_launch_compiles_none(monkeypatch):
    import triton

    case, compiled = Case("blocks(bits=4)"), []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **made: compiled.append(made["repr"]))
    launches = [
        case.many.encoder(case.batches[0], values(1), values(2), case.payloads),
        case.many.marker(case.batches[0], case.payloads),
        case.many.decoder(case.batches[0], case.payloads, values(3), adds=False),
    ]
    case.many.compile()
    kernels = sorted(each.split("[")[0] for each in compiled if "_many" in each)
    assert kernels == ["decode_many", "encode_1_many"]  # `mark` may have been compiled for another codec
    before = len(compiled)
    for each in launches:
        each.start()
    assert len(compiled) == before


def test_encoders_share_the_memory_of_their_sums_and_those_made_with_less_keep_it():
    """Encoders run one after the other: 331 pieces of ResNet-50 had 5 MB of sums that nothing reads again."""
    case = Case("onebit")
    headers, skipped = ([case.device.header(700, flag) for _ in range(9)] for flag in (False, True))
    places = [[4096 * number for number in range(9)]]
    many = Batch([(0, 700)] * 9, places, range(9), headers, skipped, case.device.kernels.kernels)
    gradient, payloads = values(1), torch.zeros(9 * 4096, dtype=torch.uint8, device=DEVICE)
    small = case.many.encoder(case.batches[0], gradient, None, case.payloads)
    first, again = case.many._partials, case.many.encoder(case.batches[1], gradient, None, case.payloads)
    assert case.many._partials is first
    case.many.encoder(many, gradient, None, payloads).start()
    assert case.many._partials is not first
    for which, each in enumerate((small, again)):
        each.start()
        assert torch.equal(case.payload(which, 0), payloads[: case.nbytes[0]])
