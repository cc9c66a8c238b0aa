"""The shipped algorithms: what each promises, against plain numpy, and that none is longer than the paper's Table 5."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

import penstock.compll
from penstock.codecs.header import parse_header
from penstock.codecs.registry import make_codec
from penstock.compll.backends.reference import ReferenceKernels
from penstock.compll.frontend.parameters import bind_arguments
from penstock.compll.frontend.parser import parse
from penstock.compll.frontend.source import compile_file
from penstock.errors import NonFiniteError

ALGORITHMS = Path(penstock.compll.__file__).parent / "algorithms"
TABLE_5 = {"onebit": (21, 9), "tbq": (13, 18), "terngrad": (23, 7), "dgc": (29, 15), "graddrop": (29, 21)}


@cache
def kernels(name, **params):
    program = compile_file(ALGORITHMS / f"{name}.cll", params)
    names = [parameter.name for parameter in program.arguments]
    return ReferenceKernels(program), dict(zip(names, bind_arguments(program, params), strict=True))


def gradient(numel=10_007, seed=0):
    return np.random.default_rng(seed).standard_normal(numel).astype(np.float32)


def round_trip(name, values, seed=0, **params):
    codec, arguments = kernels(name, **params)
    payload = codec.encode(values, arguments, seed)
    return payload, codec.decode(payload, values.size, arguments)


@pytest.mark.parametrize("name", TABLE_5)
def test_no_more_lines_than_the_paper_counts(name):
    path = ALGORITHMS / f"{name}.cll"
    lines = path.read_text().splitlines()
    logic = udf = 0
    for function in parse(path.read_text()).functions:
        body = lines[function.at.line - 1 : function.end.line]
        counted = sum(bool(line.split("//")[0].strip()) for line in body)
        logic, udf = (logic + counted, udf) if function.name in ("encode", "decode") else (logic, udf + counted)
    assert logic <= TABLE_5[name][0]
    assert udf <= TABLE_5[name][1]


def test_onebit_decodes_to_the_mean_of_each_sign():
    values = gradient()
    _, decoded = round_trip("onebit", values)
    up = values >= 0
    wanted = np.where(up, values[up].mean(dtype=np.float64), values[~up].mean(dtype=np.float64))
    assert np.allclose(decoded, wanted, rtol=1e-6)


def test_signsgd_decodes_to_the_sign():
    assert np.array_equal(round_trip("signsgd", gradient())[1], np.where(gradient() >= 0, 1, -1))


def test_tbq_keeps_only_what_reaches_the_threshold():
    values = gradient()
    _, decoded = round_trip("tbq", values, tau=1.5)
    assert np.array_equal(decoded, np.sign(values) * np.float32(1.5) * (np.abs(values) >= 1.5))


@pytest.mark.parametrize("bitwidth", [1, 2, 4, 8])
def test_terngrad_is_right_on_average_and_never_a_gap_off(bitwidth):
    values = gradient(500)
    gap = (values.max() - values.min()) / (2**bitwidth - 1)
    decoded = [round_trip("terngrad", values, seed, bitwidth=bitwidth)[1] for seed in range(400)]
    assert np.abs(decoded - values).max() <= gap * 1.001
    assert np.abs(np.mean(decoded, axis=0) - values).max() < 0.13 * gap  # five deviations of the mean of 400


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_is_right_on_average(bits):
    values = gradient(512)
    step = np.linalg.norm(values) / (2 ** (bits - 1) - 1)
    decoded = [round_trip("qsgd", values, seed, bits=bits)[1] for seed in range(400)]
    assert np.abs(decoded - values).max() <= step * 1.001
    assert np.abs(np.mean(decoded, axis=0) - values).max() < 0.13 * step


def test_qsgd_scales_every_bucket_by_its_own_norm():
    values = gradient(1024)
    values[512:] *= 1e-6
    _, decoded = round_trip("qsgd", values, bits=8)
    assert np.abs(decoded[512:] - values[512:]).max() < 1e-6


def test_topk_sends_exactly_the_k_largest():
    values = gradient()
    payload, decoded = round_trip("topk", values, density=0.01)
    chosen = np.argsort(-np.abs(values), kind="stable")[:101]  # ceil of 100.07
    assert payload.size == 4 + 8 * 101
    wanted = np.zeros_like(values)
    wanted[chosen] = values[chosen]
    assert np.array_equal(decoded, wanted)


@pytest.mark.parametrize("values", [np.ones(1000, np.float32), np.zeros(1000, np.float32)])
def test_topk_sends_exactly_k_where_all_are_equal(values):
    payload, _ = round_trip("topk", values, density=0.1)
    assert payload.size == 4 + 8 * 100


def test_dgc_sends_at_most_k_and_nearly_that_many():
    values = gradient(200_000)
    payload, decoded = round_trip("dgc", values, density=0.01)
    sent = np.flatnonzero(decoded)
    assert 1500 < sent.size <= 2000
    assert np.array_equal(decoded[sent], values[sent])
    assert payload.size == 4 + 8 * sent.size


def test_dgc_sends_at_most_k_where_all_are_equal():
    assert round_trip("dgc", np.ones(1000, np.float32), density=0.01)[0].size == 4 + 8 * 10


def test_graddrop_sends_everything_above_its_threshold():
    values = gradient(200_000)
    _, decoded = round_trip("graddrop", values, density=0.01)
    sent = np.flatnonzero(decoded)
    assert 1500 < sent.size < 2500
    assert np.abs(values[decoded == 0]).max() <= np.abs(values[sent]).min()


@pytest.mark.parametrize("numel", [1, 2, 3, 1000, 1001])
@pytest.mark.parametrize("density", [0.001, 1.0])
def test_graddrop_never_sends_more_than_dense_where_all_are_equal(numel, density):
    payload, decoded = round_trip("graddrop", np.full(numel, 0.5, np.float32), density=density)
    assert payload.size - 4 <= max(2 * numel, 8)  # as 16-bit elements; 4: the count; one value has to be sent at least
    assert np.count_nonzero(decoded) == max(numel // 4, 1)
    assert set(decoded[decoded != 0]) == {0.5}


@pytest.mark.parametrize("density", [0.001, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_graddrop_sends_at_most_68_bytes_more_than_dense_and_76_of_one_value(density, dtype):
    """Than the gradient as it is: 2 bytes an element of float16."""
    codec = make_codec(f"graddrop(density={density})")
    for numel in (1, 2, 3, 4, 5, 31, 32, 33, 255, 1000, 1001, 70_001):
        limit = max(np.dtype(dtype).itemsize * numel, 8) + 68
        assert codec.max_nbytes(numel) == max(8 * (numel // 4), 8) + 68 <= limit
        for values in (np.ones(numel), np.linspace(-1, 1, numel), np.random.default_rng(0).standard_normal(numel)):
            payload = np.zeros(codec.max_nbytes(numel), np.uint8)
            codec.encode(values.astype(dtype), np.zeros(numel, np.float32), payload)
            header = parse_header(payload.data, 1 << 48)
            assert header.nbytes == 64
            assert header.nbytes + header.body_nbytes <= limit


@pytest.mark.parametrize("bitwidth", [2, 4, 8])
@pytest.mark.parametrize("reach", [3, 100, 300, 1000, 100_000])
def test_terngrad_rounds_denormals_to_a_neighbouring_level(bitwidth, reach):
    """`gap` has few bits there: rounded down, 255 of them ended below the largest value, or were all zero."""
    smallest = np.float32(2.0**-149)
    values = np.random.default_rng(0).integers(-reach, reach + 1, 1000).astype(np.float32) * smallest
    payload, decoded = round_trip("terngrad", values, bitwidth=bitwidth)
    gap = 2 * float(payload[6:10].view(np.float32)[0])
    assert gap * ((1 << bitwidth) - 1) >= float(values.max()) - float(values.min()) - 2 * smallest  # halved: 1 ulp each
    assert np.abs(decoded.astype(np.float64) - values).max() <= gap + 2 * smallest
    means = np.mean([round_trip("terngrad", values, seed, bitwidth=bitwidth)[1] for seed in range(200)], axis=0)
    assert abs((means - values).mean()) <= 0.02 * gap + smallest


def test_adacomp_sends_the_largest_of_every_bin_as_one_magnitude():
    values = gradient(5000)
    _, decoded = round_trip("adacomp", values, bin=500)
    peaks = np.abs(values).reshape(10, 500).max(axis=1)
    assert np.allclose(np.unique(np.abs(decoded[decoded != 0])), peaks.mean(dtype=np.float64), rtol=1e-6)
    assert np.array_equal(decoded != 0, np.abs(2 * values) >= np.repeat(peaks, 500))


def test_3lc_sends_three_values_and_packs_runs_of_zeros():
    values = gradient()
    payload, decoded = round_trip("3lc", values)
    scale = np.abs(values).max()
    assert np.array_equal(decoded, np.rint(values / scale) * scale)
    assert payload.size < 8 + 10_007 / 5


def test_3lc_takes_one_byte_for_seventy_zeros():
    values = np.zeros(7000, np.float32)
    values[0] = 1
    payload, decoded = round_trip("3lc", values)
    assert payload.size == 8 + 1 + 100  # the first quintet, then 1399 of zeros in runs of 14
    assert np.array_equal(decoded, values)


def test_fp16_is_numpy_half():
    values = np.append(gradient(), np.float32([65504, -65519, 1e-7, 65519]))
    _, decoded = round_trip("fp16", values)
    assert np.array_equal(decoded, values.astype(np.float16).astype(np.float32))
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize("value", [65520, -65520, 1e6, -3e38])
def test_fp16_refuses_what_no_half_holds_as_it_refuses_infinity(value):
    with pytest.raises(NonFiniteError, match="largest is not finite: the gradient's values are too large"):
        round_trip("fp16", np.append(gradient(100), np.float32(value)))


def test_bf16_is_the_nearest_with_ties_to_even():
    torch = pytest.importorskip("torch")
    values = np.append(gradient(), np.float32([1.00390625, 1.01171875, 3.4e38, -3.4e38, 1e-40]))
    _, decoded = round_trip("bf16", values)
    clipped = torch.from_numpy(np.clip(values, -3.3895314e38, 3.3895314e38))
    assert np.array_equal(decoded, clipped.bfloat16().float().numpy())


@pytest.mark.parametrize(("mantissa", "dtype"), [(3, "float8_e4m3fn"), (2, "float8_e5m2")])
def test_fp8_is_what_torch_rounds_to_after_scaling(mantissa, dtype):
    torch = pytest.importorskip("torch")
    values = gradient() * np.float32(1e-4) ** np.random.default_rng(1).random(10_007).astype(np.float32)
    payload, decoded = round_trip("fp8", values, mantissa=mantissa)
    step = payload[:4].view(np.float32)[0]
    wanted = torch.from_numpy(values / step).to(getattr(torch, dtype)).float().numpy() * step
    assert np.array_equal(decoded, wanted)
    assert np.array_equal(
        payload[4:], torch.from_numpy(values / step).to(getattr(torch, dtype)).view(torch.uint8).numpy()
    )


@pytest.mark.parametrize("name", sorted(path.stem for path in ALGORITHMS.glob("*.cll")))
@pytest.mark.parametrize("numel", [0, 1, 2, 9])
def test_small_and_constant_gradients_are_ordinary(name, numel):
    for value in (0.0, 0.5, -1e-40):
        _, decoded = round_trip(name, np.full(numel, value, np.float32))
        assert decoded.shape == (numel,)
        assert np.isfinite(decoded).all()


MOST = np.finfo(np.float32).max
HUGE = {
    "near 1e38": np.float32([1e38, 3e38, -3e38, 1, 3e38, 3e38, 3e38]),
    "the largest there is": np.full(3000, MOST, np.float32),
    "of both signs": np.resize(np.float32([MOST, -MOST]), 3000),
    "many": gradient() * np.float32(5e37),
}
REFUSING = {"fp16": 65504, "qsgd": 1.8e19}  # the largest value that they send


@pytest.mark.parametrize("values", HUGE.values(), ids=HUGE)
@pytest.mark.parametrize("name", sorted({path.stem for path in ALGORITHMS.glob("*.cll")} - set(REFUSING)))
def test_finite_values_of_any_size_are_sent_and_stay_finite(name, values):
    _, decoded = round_trip(name, values)
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize("values", HUGE.values(), ids=HUGE)
@pytest.mark.parametrize("name", REFUSING)
def test_what_a_codec_cannot_hold_is_refused(name, values):
    with pytest.raises(NonFiniteError, match="is not finite: the gradient's values are too large"):
        round_trip(name, values)


@pytest.mark.parametrize("values", HUGE.values(), ids=HUGE)
def test_onebit_sends_the_means_of_values_whose_sum_overflows(values):
    up = values >= 0
    means = [values[one].mean(dtype=np.float64) if one.any() else 0.0 for one in (up, ~up)]
    assert np.allclose(round_trip("onebit", values)[1], np.where(up, *means), rtol=1e-6)


@pytest.mark.parametrize("bitwidth", [1, 2, 8])
def test_terngrad_is_never_a_gap_off_though_the_range_overflows(bitwidth):
    values = gradient(500) * np.float32(5e37)
    values[:2] = MOST, -MOST
    gap = 2 * float(MOST) / (2**bitwidth - 1)
    decoded = round_trip("terngrad", values, bitwidth=bitwidth)[1].astype(np.float64)
    assert np.abs(decoded - values).max() <= gap * 1.001


def test_scaling_by_a_power_of_two_scales_what_is_decoded():
    """Sums and ranges are taken of values made smaller, which must not cost a bit."""
    values = gradient()
    for name in ("onebit", "terngrad", "adacomp", "3lc"):
        once, again = (round_trip(name, values * np.float32(factor))[1] for factor in (1, 2.0**-60))
        assert np.array_equal(again * np.float32(2.0**60), once)
