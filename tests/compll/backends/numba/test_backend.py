"""The numba back end against the reference: every bit, except that a float sum may differ by its order."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from compll.backends.programs import PROGRAMS
from penstock.compll.backends.numba.backend import NumbaKernels, _take_from_cache
from penstock.compll.backends.numba.write_numba import generate
from penstock.compll.backends.reference import ReferenceKernels
from penstock.compll.cache import load_program
from penstock.compll.frontend import source as frontend
from penstock.compll.frontend.parameters import bind_arguments
from penstock.compll.functions import FUNCTIONS
from penstock.compll.lower.payload_layout import place_fields
from penstock.compll.operators import OPERATORS
from penstock.compll.types import FLOAT, Vector
from penstock.errors import CodecError, NonFiniteError

SHIPPED = sorted((Path(frontend.__file__).parents[1] / "algorithms").glob("*.cll"))
GOLDEN = Path(__file__).parents[2] / "golden"
SIZES = [0, 1, 7, 8, 9, 1023, 1024, 1025, 5003]


def compile_named(name, params=None):
    if name in PROGRAMS and not any(path.stem == name for path in SHIPPED):
        return frontend.compile_source(PROGRAMS[name], f"{name}.cll", params)
    # as codecs do: what tests of codecs compile too is compiled once
    return load_program(next(path for path in SHIPPED if path.stem == name), params or {})


def arguments_of(program):
    values = bind_arguments(program, {})
    return {parameter.name: value for parameter, value in zip(program.arguments, values, strict=True)}


# The small programs share most of their kernels' shape with the shipped ones; compiling all takes a minute more.
NAMES = [path.stem for path in SHIPPED] + ["dice", "runs"]
SLOW = sorted(set(PROGRAMS) - set(NAMES))


@pytest.fixture(scope="module", params=[*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def both(request):
    program = compile_named(request.param)
    return ReferenceKernels(program), NumbaKernels(program), arguments_of(program)


def gradient(numel, seed=0):
    return np.random.default_rng(seed).standard_normal(numel).astype(np.float32)


def assert_same_payload(program, found, wanted, numel):
    """Integers, packed values and indices to the bit; floats to 1e-6, for a mean or a norm is a sum."""
    places = zip(place_fields(program.layout, found, numel), place_fields(program.layout, wanted, numel), strict=True)
    for ours, theirs in places:
        a, b = (data[at.offset : at.offset + at.nbytes] for data, at in ((found, ours), (wanted, theirs)))
        kind = ours.field.type
        if kind in (FLOAT, Vector(FLOAT)):
            assert np.allclose(np.frombuffer(a.tobytes(), "<f4"), np.frombuffer(b.tobytes(), "<f4"), rtol=1e-6, atol=0)
        else:
            assert np.array_equal(a, b), ours.field.name


@pytest.mark.parametrize("numel", SIZES)
def test_encode_and_decode_agree_with_the_reference(both, numel):
    reference, kernels, arguments = both
    values = gradient(numel)
    payload = reference.encode(values, arguments, seed=7)
    found = kernels.encode(values, arguments, seed=7)
    assert_same_payload(reference.program, found, payload, numel)
    assert np.array_equal(kernels.decode(payload, numel, arguments), reference.decode(payload, numel, arguments))


@pytest.mark.parametrize("numel", SIZES)
def test_the_residual_is_exactly_what_was_not_sent(both, numel):
    reference, kernels, arguments = both
    residual = gradient(numel, seed=1)
    total = gradient(numel) + residual
    payload = kernels.encode(gradient(numel), arguments, seed=7, residual=residual)
    assert np.array_equal(residual, total - reference.decode(payload, numel, arguments))


@pytest.mark.parametrize("numel", SIZES)
def test_feedback_sends_what_the_reference_sends(both, numel):
    reference, kernels, arguments = both
    ours, theirs = gradient(numel, seed=1), gradient(numel, seed=1)
    found = kernels.encode(gradient(numel), arguments, seed=7, residual=ours)
    assert_same_payload(
        reference.program, found, reference.encode(gradient(numel), arguments, seed=7, residual=theirs), numel
    )


def test_decode_add_rounds_the_product_and_the_sum(both):
    reference, kernels, arguments = both
    payload = reference.encode(gradient(5003), arguments)
    wanted, found = gradient(5003, seed=1), gradient(5003, seed=1)
    reference.decode_add(payload, wanted, arguments, 0.3)
    kernels.decode_add(payload, found, arguments, 0.3)
    assert np.array_equal(found, wanted)


def test_values_near_the_largest_float_are_sent_or_refused_as_the_reference_does(both):
    reference, kernels, arguments = both
    numel = 5003
    values = gradient(numel) * np.float32(5e37)
    values[::1000] = np.finfo(np.float32).max
    try:
        payload = reference.encode(values, arguments, seed=7)
    except NonFiniteError:
        with pytest.raises(NonFiniteError):
            kernels.encode(values, arguments, seed=7)
        return
    assert_same_payload(reference.program, kernels.encode(values, arguments, seed=7), payload, numel)
    assert np.array_equal(kernels.decode(payload, numel, arguments), reference.decode(payload, numel, arguments))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_is_refused(both, bad):
    _, kernels, arguments = both
    values = gradient(2500)
    values[1234] = bad
    for residual in (None, np.zeros(2500, np.float32)):
        with pytest.raises(NonFiniteError):
            kernels.encode(values, arguments, residual=residual)


def test_a_constant_gradient_survives_where_the_range_is_empty(both):
    reference, kernels, arguments = both
    values = np.full(1000, 0.25, np.float32)
    payload = kernels.encode(values, arguments)
    assert np.array_equal(kernels.decode(payload, 1000, arguments), reference.decode(payload, 1000, arguments))


@pytest.mark.parametrize("bitwidth", [1, 2, 4, 8])
def test_every_width_of_terngrad_agrees(bitwidth):
    program = compile_named("terngrad", {"bitwidth": bitwidth})
    payload = ReferenceKernels(program).encode(gradient(4099), {}, seed=11)
    assert np.array_equal(NumbaKernels(program).encode(gradient(4099), {}, seed=11), payload)


@pytest.mark.parametrize(("name", "params"), [("fp8", {"mantissa": 2}), ("qsgd", {"bits": 2}), ("qsgd", {"bits": 8})])
def test_other_constants_agree_too(name, params):
    program = compile_named(name, params)
    payload = ReferenceKernels(program).encode(gradient(4099), {}, seed=11)
    assert_same_payload(program, NumbaKernels(program).encode(gradient(4099), {}, seed=11), payload, 4099)


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)
PAIRS = {name: (compile_named(name), NumbaKernels(compile_named(name))) for name in ("tbq", "terngrad", "bf16", "3lc")}


@pytest.mark.parametrize("name", sorted(PAIRS))
@given(values=arrays.arrays(np.float32, st.integers(0, 40), elements=FINITE), seed=st.integers(0, 2**64 - 1))
def test_any_finite_floats_are_encoded_alike(name, values, seed):
    program, kernels = PAIRS[name]
    arguments = arguments_of(program)
    wanted = payload_or_refusal(ReferenceKernels(program), values, arguments, seed)
    assert payload_or_refusal(kernels, values, arguments, seed) == wanted


def payload_or_refusal(kernels, values, arguments, seed):
    """Return the payload; values whose range is no float32 are refused."""
    try:
        return kernels.encode(values, arguments, seed).tobytes()
    except NonFiniteError as error:
        return type(error)


def test_values_whose_range_is_no_float32_are_sent_alike_by_both():
    program, kernels = PAIRS["terngrad"]
    values = np.array([3.4028235e38, -3.1e38, -1.0141205e31], np.float32)
    assert np.array_equal(kernels.encode(values, {}), ReferenceKernels(program).encode(values, {}))


def test_damaged_payloads_raise_what_the_reference_raises(both):
    reference, kernels, arguments = both
    payload = reference.encode(gradient(1000), arguments)
    cases = [payload[:-1], np.append(payload, np.uint8(0)), payload[:0]]
    for damaged in cases:
        with pytest.raises(CodecError) as wanted:
            reference.decode(damaged, 1000, arguments)
        with pytest.raises(CodecError) as found:
            kernels.decode(damaged, 1000, arguments)
        assert str(found.value) == str(wanted.value)


def test_an_index_outside_the_gradient_is_refused():
    program = compile_named("topk")
    kernels, arguments = NumbaKernels(program), arguments_of(program)
    payload = kernels.encode(gradient(5000), arguments)
    for index in (-1, 5000, 2**31 - 1):
        damaged = payload.copy()
        damaged[4:8] = np.frombuffer(np.int32(index).tobytes(), np.uint8)
        with pytest.raises(CodecError, match="wanted 0 to 4999"):
            kernels.decode(damaged, 5000, arguments)


def test_payloads_and_gradients_may_be_read_only_and_start_anywhere():
    kernels = NumbaKernels(compile_named("terngrad"))
    values = gradient(1000)
    payload = kernels.encode(values, {})
    shifted = np.zeros(payload.size + 1, np.uint8)[1:]
    shifted[:] = payload
    for data in (np.frombuffer(payload.tobytes(), np.uint8), shifted):
        assert np.array_equal(kernels.decode(data, 1000, {}), kernels.decode(payload, 1000, {}))
    values.flags.writeable = False
    assert np.array_equal(kernels.encode(values, {}), payload)


def test_several_threads_may_use_the_same_kernels():
    kernels = NumbaKernels(compile_named("terngrad"))
    wanted = [kernels.encode(gradient(50_000, seed), {}, seed) for seed in range(4)]
    found = [np.empty(0, np.uint8)] * 4

    def work(seed):
        for _ in range(5):
            found[seed] = kernels.encode(gradient(50_000, seed), {}, seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


SECOND_PROCESS = """
import sys, numpy as np
from pathlib import Path
from penstock.compll.frontend import source as frontend
from penstock.compll.backends.numba.backend import NumbaKernels
program = frontend.compile_file(Path(frontend.__file__).parents[1] / "algorithms" / "signsgd.cll")
kernels = NumbaKernels(program, cache_dir=Path(sys.argv[1]))
assert kernels.encode(np.ones(9, np.float32), {}).tolist() == [7, 255, 1]
stats = kernels.kernel("encode").stats
compiler = "numba.np.linalg" in sys.modules
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()), compiler)
"""


def test_machine_code_is_kept_on_disk_and_the_next_process_loads_no_compiler(tmp_path):
    run = [sys.executable, "-c", SECOND_PROCESS, str(tmp_path)]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout.split() == ["0", "1", "True"]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout.split() == ["1", "0", "False"]


def test_a_numba_that_looks_otherwise_inside_is_asked_in_its_own_way():
    class OtherDispatcher:
        targetctx = None

    assert not _take_from_cache(OtherDispatcher(), "int64()")


@pytest.mark.parametrize("name", [path.stem for path in SHIPPED])
def test_generated_source_is_the_golden_one(name, request):
    path, text = GOLDEN / f"{name}.numba.txt", generate(compile_named(name), FUNCTIONS, OPERATORS)
    if request.config.getoption("--update-golden", default=False):
        path.write_text(text)
    assert path.read_text() == text
