"""Values by block: what blocks, onebit and terngrad promise of every block, on all back ends, against plain numpy."""

import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
pytest.importorskip("triton", reason="install penstock[gpu] to test the Triton back end")

import penstock.compll  # noqa: E402
from penstock.codecs.registry import make_codec  # noqa: E402
from penstock.compll.backends.numba.backend import NumbaKernels  # noqa: E402
from penstock.compll.backends.reference import ReferenceKernels  # noqa: E402
from penstock.compll.backends.triton.backend import TritonKernels  # noqa: E402
from penstock.compll.cache import load_program  # noqa: E402
from penstock.compll.frontend.source import compile_source  # noqa: E402
from penstock.errors import CodecError, NonFiniteError  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALGORITHMS = Path(penstock.compll.__file__).parent / "algorithms"
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)
LEVELS = {2: (-1, 2, 3), 4: (-7, 8, 8), 8: (-127, 128, 128)}  # smallest, greatest, steps of the largest value
SIZES = [0, 7, 129, 2500]


@cache
def program(name, **params):
    return load_program(ALGORITHMS / f"{name}.cll", params)


def defaults(made):
    """Return what kernels of a program are called with where a codec names nothing else."""
    return {each.name: each.default for each in made.arguments}


def round_trip(values, name="blocks", seed=0, **params):
    made = program(name, **params)
    kernels = ReferenceKernels(made)
    payload = kernels.encode(values, defaults(made), seed)
    return payload, kernels.decode(payload, values.size, defaults(made))


def gradient(numel, seed=0):
    """Return values of many magnitudes, with blocks that are zero, subnormal and nearly too large for a float."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(numel) * np.exp(2 * rng.standard_normal(numel))).astype(np.float32)
    if numel >= 1000:
        values[128:256] = 0
        values[256:384] = np.float32(-1e-40)
        values[384:512] *= np.float32(3.4e38) / np.abs(values[384:512]).max()
    return values


def step_at(payload, number, count):
    """Return a block's step, the bfloat16 behind the codes."""
    word = payload[payload.size - 2 * count :].view("<u2")[number]
    return (np.uint32(word) << np.uint32(16)).view(np.float32)


# The codec against plain numpy


@pytest.mark.parametrize("block", [1, 5, 128])
@pytest.mark.parametrize("bits", [2, 4, 8])
@given(values=arrays.arrays(np.float32, st.integers(0, 300), elements=FINITE))
@example(values=np.array([1.5736349e-37], np.float32))
@settings(max_examples=25, deadline=None)
def test_every_value_becomes_the_nearest_multiple_of_its_blocks_step(bits, block, values):
    low, high, reach = LEVELS[bits]
    payload, decoded = round_trip(values, bits=bits, block=block)
    count = -(-values.size // block)
    assert payload.size == -(-values.size * bits // 8) + 2 * count
    for number in range(count):
        part, found = (each[number * block : (number + 1) * block].astype(np.float64) for each in (values, decoded))
        step = float(step_at(payload, number, count))
        peak = part[np.abs(part).argmax()]
        if abs(peak) < reach * 2.0**-126:  # the step is a denormal bfloat16, of few bits: only nothing grows
            assert np.abs(found).max() <= 1.01 * abs(peak) + reach * 2.0**-133
            continue
        assert 1 - 1e-6 <= abs(step) * reach / min(abs(peak), 3.38e38) <= 1 + 2**-6
        assert np.sign(step) == np.sign(peak) or (part == -peak).any()
        within = np.clip(part / step, low - 0.5, high + 0.5) == part / step
        assert np.abs(found - part)[within].max(initial=0) <= abs(step) * (0.5 + 1e-4)
        assert np.isin(found[~within] / step, (low, high)).all()


def test_the_largest_value_of_a_block_has_the_last_code():
    values = gradient(128)
    for sign in (1, -1):
        payload, decoded = round_trip(sign * values, bits=4)
        largest = np.abs(values).argmax()
        code = payload[largest // 2] >> (largest % 2 * 4) & 15
        assert code == 15
        assert decoded[largest] == pytest.approx(sign * values[largest], rel=2**-6)


def test_an_outlier_coarsens_its_own_block_only():
    values = np.random.default_rng(0).standard_normal(512).astype(np.float32)
    _, before = round_trip(values, bits=4)
    values[5] = 1e6
    _, after = round_trip(values, bits=4)
    assert np.array_equal(before[64:], after[64:])
    assert np.abs(after[:64] - values[:64]).max() > 1


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_stochastic_rounding_is_right_on_average_and_never_a_step_off(bits):
    values = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    decoded = [round_trip(values, seed=seed, bits=bits, stochastic=1)[1] for seed in range(300)]
    step = np.abs(values).max() / (2 ** (bits - 1) - 1) * 1.01
    assert np.abs(np.subtract(decoded, values)).max() <= step
    assert np.abs(np.mean(decoded, axis=0) - values).max() < 0.15 * step  # five deviations of the mean of 300


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("feedback", [1.0, 0.25])
def test_all_ranks_get_everything_in_the_end(bits, feedback):
    given = {"feedback": feedback}
    values, residual, sent = gradient(900), np.zeros(900, np.float32), np.zeros(900)
    kernels = ReferenceKernels(program("blocks", bits=bits))
    for _ in range(60):
        sent += kernels.decode(kernels.encode(values, given, residual=residual), 900, given)
    assert np.allclose(sent + residual, 60.0 * values, rtol=1e-4, atol=1e-30)
    assert np.abs(sent / 60 - values).max() < np.abs(values).max() / 30


# A block is coded as a tensor of its own would be


@pytest.mark.parametrize(("name", "block"), [("blocks", 64), ("blocks", 7), ("onebit", 64), ("onebit", 7)])
def test_a_block_decodes_to_what_it_would_by_itself(name, block):
    values = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    _, decoded = round_trip(values, name, block=block)
    for first in range(0, 1000, block):
        _, alone = round_trip(values[first : first + block], name, block=0)
        assert np.array_equal(decoded[first : first + block], alone)


def test_terngrad_rounds_between_the_smallest_and_the_greatest_of_each_block():
    values = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    decoded = np.array([round_trip(values, "terngrad", seed, bitwidth=1, block=100)[1] for seed in range(50)])
    for first in range(0, 1000, 100):
        part = values[first : first + 100]
        assert np.allclose(np.unique(decoded[:, first : first + 100]), [part.min(), part.max()], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "onebit",
            "504e534b010000000a000000000000000b000000000000006f6e656269740000000000000000000000000000330dba47"
            "062549f23f0000b0bf7503",
        ),
        (
            "terngrad",
            "504e534b010100000a000000000000000d000000000000007465726e6772616400000000000000000000000000000040"
            "000000000000000000000000a0babbf602020000c0bfabaaea3f157505",
        ),
    ],
)
def test_payloads_without_blocks_have_no_sign_of_blocks(name, wanted):
    values = np.float32([0.5, -1, 2, -3, 0.25, 0, 8, -0.125, 1, 1.5])
    codec = make_codec(name, seed=1)
    out = np.zeros(codec.max_nbytes(10), np.uint8)
    assert out[: codec.encode(values, None, out)].tobytes().hex() == wanted


def test_payloads_of_other_blocks_are_refused():
    out, values = np.zeros(4096, np.uint8), gradient(100)
    nbytes = make_codec("onebit(block=8)").encode(values, None, out)
    with pytest.raises(CodecError, match=r"payload of onebit\(8\); wanted onebit\(\)"):
        make_codec("onebit").decode(out[:nbytes], values)


# Back ends agree

TRIED = [
    ("blocks", {}),
    pytest.param("blocks", {"bits": 2, "block": 256, "stochastic": 1}, marks=pytest.mark.slow),
    ("blocks", {"bits": 8, "block": 100}),  # no tile of a GPU holds whole blocks of 100
    pytest.param("terngrad", {"block": 64}, marks=pytest.mark.slow),
    ("onebit", {"block": 8}),
]


@pytest.mark.parametrize(("name", "params"), TRIED)
def test_back_ends_agree_to_the_bit(name, params):
    made = program(name, **params)
    reference, numba, triton = ReferenceKernels(made), NumbaKernels(made), TritonKernels(made, DEVICE)
    given = defaults(made)
    for numel in SIZES:
        values, owed = gradient(numel), gradient(numel, seed=1) * np.float32(0.01)
        if name != "blocks":
            values, owed = (np.clip(each, -1e30, 1e30) for each in (values, owed))
        payload = reference.encode(values, given, seed=7)
        decoded = reference.decode(payload, numel, given)
        on_device = torch.from_numpy(values).to(DEVICE)
        assert np.array_equal(numba.encode(values, given, seed=7), payload)
        assert np.array_equal(triton.encode(on_device, given, seed=7).cpu().numpy(), payload)
        assert np.array_equal(numba.decode(payload, numel, given), decoded)
        theirs = torch.from_numpy(payload.copy()).to(DEVICE)
        assert np.array_equal(triton.decode(theirs, numel, given).cpu().numpy(), decoded)
        triton.check()
        _agree_on_feedback(reference, numba, triton, given, values, owed, payload, decoded)


def _agree_on_feedback(reference, numba, triton, given, values, owed, payload, decoded):
    """Feedback at once, and put off to the next call, leave the same payloads and residuals."""
    mine, wanted = owed.copy(), owed.copy()
    sent = reference.encode(values, given, seed=3, residual=wanted)
    assert np.array_equal(numba.encode(values, given, seed=3, residual=mine), sent)
    assert np.array_equal(mine, wanted)
    total, wanted = values + (owed - decoded), owed - decoded
    later = reference.encode(values, given, seed=4, residual=wanted)
    mine, room = owed.copy(), np.empty_like(payload)
    assert np.array_equal(numba.encode_later(values, given, 4, mine, payload, room), later)
    assert np.array_equal(mine, total)
    kept, last = (torch.from_numpy(each.copy()).to(DEVICE) for each in (owed, payload))
    found = triton.encode(torch.from_numpy(values).to(DEVICE), given, seed=4, residual=kept, last=last)
    assert np.array_equal(found.cpu().numpy(), later)
    assert np.array_equal(kept.cpu().numpy(), total)


@given(values=arrays.arrays(np.float32, st.integers(0, 300), elements=FINITE))
@settings(max_examples=50, deadline=None)
def test_any_finite_floats_are_encoded_alike(values):
    made = program("blocks")
    reference, numba, given = ReferenceKernels(made), NumbaKernels(made), defaults(made)
    payload = reference.encode(values, given)
    assert np.array_equal(numba.encode(values, given), payload)
    decoded = numba.decode(payload, values.size, given)
    assert np.isfinite(decoded).all()
    assert np.array_equal(decoded, reference.decode(payload, values.size, given))


def test_the_largest_floats_and_what_is_owed_of_them_are_encoded_alike_and_stay_finite():
    """Gradients and residuals of opposite signs: all sums are finite; of some, less the gradient again, that is not."""
    made = program("blocks")
    greatest, many = np.finfo(np.float32).max, 640
    owed = np.random.default_rng(0).choice(np.float32([greatest, -greatest, 3e38, 0, -0.0, 1e-45, -1e-45]), many)
    values = -owed * np.random.default_rng(1).choice(np.float32([0, 1e-7, 0.3, 1]), many)
    owed[:64], values[:64] = -1e-45, -0.0  # a quarter of this is -0
    owed[64:192:2], values[64:192:2] = greatest, -1.5 * 2.0**104  # both the sum and its difference are rounded up
    owed[128:192], values[128:192] = -owed[64:128], -values[64:128]
    with np.errstate(over="ignore"):
        assert not np.isfinite((values + owed) - values).all()
        reference, numba, triton = ReferenceKernels(made), NumbaKernels(made), TritonKernels(made, DEVICE)
        given, wanted, mine = defaults(made), owed.copy(), owed.copy()
        payload = reference.encode(values, given, residual=wanted)
        assert np.isfinite(wanted).all()
        assert np.isfinite(reference.decode(payload, many, given)).all()
        assert np.array_equal(numba.encode(values, given, residual=mine), payload)
        assert mine.tobytes() == wanted.tobytes()
        theirs = torch.from_numpy(owed.copy()).to(DEVICE)
        found = triton.encode(torch.from_numpy(values).to(DEVICE), given, residual=theirs)
    assert np.array_equal(found.cpu().numpy(), payload)
    assert np.array_equal(theirs.cpu().numpy(), values + owed)  # what was sent is taken off by the next call


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_is_refused_wherever_it_lies(bad):
    made = program("blocks")
    kernels, given = NumbaKernels(made), defaults(made)
    for place in (0, 63, 64, 1023, 1024, 2047, 2048, 2499):
        values, owed = gradient(2500), np.zeros(2500, np.float32)
        values[place] = bad
        for residual in (None, owed):
            with pytest.raises(NonFiniteError):
                kernels.encode(values, given, residual=residual)


# The language

SOURCE = """
param P { uint16 block = 4; }
float[P.block] mean;
uint1 isAbove(float x) { return x > mean; }
float back(uint1 above) { return above ? mean + 1 : mean; }
void encode(float* gradient, uint8* compressed, P params) {
    int32[P.block] many = reduce(gradient, size, params.block);
    mean = reduce(gradient, sum, params.block) / many;
    compressed = concat(mean, map(gradient, isAbove));
}
void decode(uint8* compressed, float* gradient, P params) {
    mean = extract(compressed);
    uint1* above = extract(compressed);
    gradient = map(above, back);
}
"""


@pytest.mark.parametrize("block", [0, 1, 4, 100])
def test_a_scalar_by_block_is_computed_with_as_one_for_the_tensor_is(block):
    values = np.arange(10, dtype=np.float32)
    kernels = ReferenceKernels(compile_source(SOURCE, params={"block": block}))
    payload = kernels.encode(values, {})
    parts = np.split(values, range(block, 10, block)) if block else [values]
    means = [np.float32(part.mean()) for part in parts]
    wanted = [mean + (part > mean) for part, mean in zip(parts, means, strict=True)]
    assert payload[: 4 * len(parts)].view(np.float32).tolist() == means
    assert np.array_equal(kernels.decode(payload, 10, {}), np.concatenate(wanted).astype(np.float32))
