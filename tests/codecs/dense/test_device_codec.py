"""The GPU side of every codec, in Triton's interpreter where there is no GPU: headers, feedback, damage."""

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
pytest.importorskip("triton", reason="install penstock[gpu] to test the GPU side of codecs")

from penstock.codecs.dense.device_codec import DeviceCodec  # noqa: E402
from penstock.codecs.feedback import Residual  # noqa: E402
from penstock.codecs.header import parse_header  # noqa: E402
from penstock.codecs.registry import codec_names, make_codec  # noqa: E402
from penstock.errors import CodecError  # noqa: E402

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
NUMEL = 3001


@pytest.fixture(scope="module", params=codec_names())
def device(request) -> DeviceCodec:
    made = DeviceCodec.create(make_codec(request.param), DEVICE)
    made.codec._devices[str(DEVICE)] = made
    return made


def gradient(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUMEL, generator=generator).to(DEVICE)


def encode(device, values, residual=None, seed=5):
    out = torch.full((device.codec.max_nbytes(NUMEL),), 0xAB, dtype=torch.uint8, device=DEVICE)
    return out[: device.encode(values, residual, out, seed)]


def test_the_cpu_reads_what_the_device_wrote(device):
    payload = encode(device, gradient()).cpu().numpy()
    assert parse_header(payload.tobytes()).numel == NUMEL
    on_cpu, on_device = np.empty(NUMEL, np.float32), torch.empty(NUMEL, device=DEVICE)
    device.codec.decode(payload, on_cpu)
    device.decode(torch.from_numpy(payload).to(DEVICE), on_device, None)
    device.kernels.check()
    assert np.array_equal(on_device.cpu().numpy(), on_cpu)


def test_a_residual_that_is_put_off_is_the_one_subtracted_at_once(device):
    put_off, at_once = Residual(torch.zeros(NUMEL, device=DEVICE)), torch.zeros(NUMEL, device=DEVICE)
    for step in range(2):
        payloads = [encode(device, gradient(step), residual, seed=step) for residual in (put_off, at_once)]
        assert torch.equal(*payloads)
    assert torch.equal(put_off.values(), at_once)
    assert put_off.pending is None


@pytest.mark.parametrize("at", [4, 9, 25])
def test_a_changed_header_is_reported_and_the_output_left_alone(device, at):
    payload = encode(device, gradient())
    payload[at] ^= 1
    out = torch.full((NUMEL,), 5.0, device=DEVICE)
    device.decode(payload, out, 1.0)
    assert (out == 5).all()
    with pytest.raises(CodecError, match="the header or a field is not what encode writes"):
        device.kernels.check()


def test_a_payload_of_another_length_is_refused_on_the_host(device):
    with pytest.raises(CodecError, match=r"wanted .* for 3001 elements"):
        device.decode(torch.zeros(7, dtype=torch.uint8, device=DEVICE), torch.zeros(NUMEL, device=DEVICE), None)


def test_a_step_that_is_skipped_gives_nan_everywhere_and_leaves_the_residual_alone(device):
    codec = make_codec(device.codec.program.name, on_nonfinite="skip")
    skipping = DeviceCodec(codec, DEVICE, device.kernels)
    codec._devices[str(DEVICE)] = skipping
    residual = Residual(torch.zeros(NUMEL, device=DEVICE))
    honest = encode(skipping, gradient(1), residual)
    before, pending = residual.memory.clone(), residual.pending
    values = gradient(2)
    values[1234] = float("inf")
    payload, out, on_cpu = encode(skipping, values, residual), gradient(3), np.zeros(NUMEL, np.float32)
    assert torch.equal(residual.memory, before)
    assert residual.pending is pending
    skipping.decode(payload, out, 1.0)
    assert out.isnan().all()
    codec.decode(payload.cpu().numpy(), on_cpu)
    assert np.isnan(on_cpu).all()
    skipping.decode(honest, out, None)
    assert out.isfinite().all()
    skipping.kernels.check()
