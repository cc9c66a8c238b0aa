"""The Triton back end against the reference, to the bit: on a GPU where there is one, else in Triton's interpreter."""

import os
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decorates functions accordingly
pytest.importorskip("triton", reason="install penstock[gpu] to test the Triton back end")

from compll.backends.programs import PROGRAMS  # noqa: E402
from penstock.compll.backends.reference import ReferenceKernels  # noqa: E402
from penstock.compll.backends.triton.backend import TritonKernels  # noqa: E402
from penstock.compll.backends.triton.write_triton import Kernels  # noqa: E402
from penstock.compll.frontend import source as frontend  # noqa: E402
from penstock.compll.frontend.parameters import bind_arguments  # noqa: E402
from penstock.compll.ir import Reduce  # noqa: E402
from penstock.compll.lower.payload_layout import place_fields  # noqa: E402
from penstock.compll.types import Scalar  # noqa: E402
from penstock.errors import CodecError, NonFiniteError  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHIPPED = sorted((Path(frontend.__file__).parents[1] / "algorithms").glob("*.cll"))
GOLDEN = Path(__file__).parents[2] / "golden"
SIZES = [0, 1, 9, 1025, 5003]


def compile_named(name):
    if name in PROGRAMS:
        return frontend.compile_source(PROGRAMS[name], f"{name}.cll")
    return frontend.compile_file(next(path for path in SHIPPED if path.stem == name))


# Folds go element by element, which the interpreter is slow at.
TRIED = [pytest.param(name, marks=[pytest.mark.slow] if name == "folds" else []) for name in PROGRAMS]


@pytest.fixture(scope="module", params=[*(path.stem for path in SHIPPED), *TRIED])
def both(request):
    program = compile_named(request.param)
    values = bind_arguments(program, {})
    arguments = {parameter.name: value for parameter, value in zip(program.arguments, values, strict=True)}
    return ReferenceKernels(program), TritonKernels(program, DEVICE), arguments


def gradient(numel, seed=0):
    return np.random.default_rng(seed).standard_normal(numel).astype(np.float32)


def on_device(array):
    return torch.from_numpy(array.copy()).to(DEVICE)


def sums_floats(kernels):
    """Whether a program adds floats up: then scalars may differ by the order of the sum, and nothing else may."""
    statements = kernels.program.encode.statements
    return any(isinstance(s, Reduce) and s.reducer == "sum" and s.expr.type.is_float for s in statements)


def assert_same_payload(kernels, found, wanted, numel):
    if not sums_floats(kernels):
        assert np.array_equal(found[: wanted.size], wanted)
        return
    layout = kernels.program.layout
    for a, b in zip(
        place_fields(layout, found[: wanted.size], numel), place_fields(layout, wanted, numel), strict=True
    ):
        ours, theirs = found[a.offset : a.offset + a.nbytes], wanted[b.offset : b.offset + b.nbytes]
        if isinstance(a.field.type, Scalar) and a.field.type.is_float:
            assert np.isclose(ours.view("<f4"), theirs.view("<f4"), rtol=1e-6, atol=0)
        else:
            assert np.array_equal(ours, theirs), a.field.name


@pytest.mark.parametrize("numel", SIZES)
def test_encode_and_decode_agree_with_the_reference(both, numel):
    reference, kernels, arguments = both
    values = gradient(numel)
    payload = reference.encode(values, arguments, seed=7)
    found = kernels.encode(on_device(values), arguments, seed=7).cpu().numpy()
    assert_same_payload(kernels, found, payload, numel)
    decoded = kernels.decode(on_device(payload), numel, arguments).cpu().numpy()
    assert np.array_equal(decoded, reference.decode(payload, numel, arguments))
    kernels.check()


def test_decode_add_rounds_product_and_sum_as_the_reference_does(both):
    reference, kernels, arguments = both
    payload = reference.encode(gradient(5003), arguments)
    start = gradient(5003, seed=1)
    wanted, found = start.copy(), on_device(start)
    reference.decode_add(payload, wanted, arguments, 0.3)
    kernels.decode_add(on_device(payload), found, arguments, 0.3)
    assert np.array_equal(found.cpu().numpy(), wanted)


def test_feedback_keeps_what_was_not_sent_and_adds_it_next_time(both):
    reference, kernels, arguments = both
    carried, last = torch.zeros(3001, device=DEVICE), None
    error = np.zeros(3001, np.float32)
    for step in range(3):
        values = gradient(3001, seed=step)
        payload = reference.encode(values, arguments, seed=step, residual=error.copy())
        last = kernels.encode(on_device(values), arguments, seed=step, residual=carried, last=last)
        assert_same_payload(kernels, last.cpu().numpy(), payload, 3001)
        sent = reference.decode(last.cpu().numpy()[: payload.size], 3001, arguments)
        error = values + error - sent
        left = carried.clone()
        kernels.decode_add(last, left, arguments, -1.0)
        assert np.array_equal(left.cpu().numpy(), error)


def test_feedback_that_is_settled_at_once_leaves_what_was_not_sent(both):
    reference, kernels, arguments = both
    values, owed = gradient(3001), gradient(3001, seed=1)
    left = on_device(owed)
    payload = kernels.encode(on_device(values), arguments, seed=5, residual=left, settle=True)
    wanted = reference.encode(values, arguments, seed=5, residual=owed.copy())
    assert_same_payload(kernels, payload.cpu().numpy(), wanted, 3001)
    sent = reference.decode(payload.cpu().numpy()[: wanted.size], 3001, arguments)
    assert np.array_equal(left.cpu().numpy(), values + owed - sent)


def test_where_one_kernel_is_all_of_encode_it_settles_feedback_too():
    settling = {path.stem for path in SHIPPED if Kernels(compile_named(path.stem)).settles}
    assert settling == {"bf16", "blocks", "qsgd", "signsgd", "tbq"}  # fp16 looks for overflow first


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_gradients_are_read_and_written_as_they_are(both, dtype):
    reference, kernels, arguments = both
    values = on_device(gradient(1001)).to(getattr(torch, dtype))
    payload = reference.encode(values.float().cpu().numpy(), arguments, seed=3)
    found = kernels.encode(values, arguments, seed=3)
    assert_same_payload(kernels, found.cpu().numpy(), payload, 1001)
    out = kernels.decode(on_device(payload), 1001, arguments, out=torch.empty_like(values))
    wanted = torch.from_numpy(reference.decode(payload, 1001, arguments)).to(values.dtype)
    if DEVICE == "cpu" and dtype == "bfloat16":  # the interpreter cuts where the device rounds
        assert torch.allclose(out.float(), wanted.float(), rtol=2**-7)
    else:
        assert torch.equal(out.cpu(), wanted)


def test_values_near_the_largest_float_are_sent_or_reported_as_the_reference_does(both):
    reference, kernels, arguments = both
    numel = 5003
    values = gradient(numel) * np.float32(5e37)
    values[::1000] = np.finfo(np.float32).max
    try:
        payload = reference.encode(values, arguments, seed=7)
    except NonFiniteError:
        kernels.encode(on_device(values), arguments, seed=7)
        with pytest.raises(NonFiniteError):
            kernels.check()
        return
    found = kernels.encode(on_device(values), arguments, seed=7).cpu().numpy()
    assert_same_payload(kernels, found, payload, numel)
    decoded = kernels.decode(on_device(payload), numel, arguments).cpu().numpy()
    assert np.array_equal(decoded, reference.decode(payload, numel, arguments))
    kernels.check()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_is_reported(both, bad):
    _, kernels, arguments = both
    values = gradient(2500)
    values[1234] = bad
    kernels.encode(on_device(values), arguments)
    with pytest.raises(NonFiniteError, match=r"layer1\.weight holds values that are not finite"):
        kernels.check("layer1.weight")
    kernels.check()  # raised once


@pytest.mark.parametrize("bitwidth", [1, 2, 4, 8])
def test_every_width_of_terngrad_agrees(bitwidth):
    path = next(path for path in SHIPPED if path.stem == "terngrad")
    program = frontend.compile_file(path, {"bitwidth": bitwidth})
    values = gradient(4099)
    payload = ReferenceKernels(program).encode(values, {}, seed=11)
    assert np.array_equal(TritonKernels(program, DEVICE).encode(on_device(values), {}, seed=11).cpu().numpy(), payload)


def test_a_payload_for_another_size_is_refused_before_anything_is_launched():
    kernels = TritonKernels(compile_named("onebit"), DEVICE)
    with pytest.raises(CodecError, match="a body of 9 bytes; wanted 134 for 1000 elements"):
        kernels.decode(torch.zeros(9, dtype=torch.uint8, device=DEVICE), 1000, {})


def test_a_damaged_field_leaves_the_output_alone_and_is_reported():
    kernels = TritonKernels(compile_named("onebit"), DEVICE)
    payload = kernels.encode(on_device(gradient(1000)), {})
    payload[4] = 0x7F  # the exponent of `up`: not a number
    payload[3] = 0xFF
    out = torch.full((1000,), 5.0, device=DEVICE)
    kernels.decode(payload, 1000, {}, out=out)
    assert (out == 5).all()
    with pytest.raises(CodecError, match="a field is not what encode writes"):
        kernels.check()


@pytest.mark.parametrize(
    ("at", "value", "message"), [(4, 255, "an index lies outside"), (3, 127, "a field is not what")]
)
def test_an_index_or_a_count_out_of_range_writes_nothing_outside(at, value, message):
    kernels = TritonKernels(compile_named("topk"), DEVICE)
    arguments = {"density": 0.01}
    payload = kernels.encode(on_device(gradient(5000)), arguments)
    payload[at : at + 4] = value
    room = torch.full((5256,), 5.0, device=DEVICE)
    kernels.decode(payload, 5000, arguments, out=room[128:5128])
    assert (room[:128] == 5).all()
    assert (room[5128:] == 5).all()
    with pytest.raises(CodecError, match=message):
        kernels.check()


@pytest.mark.parametrize("name", [*(path.stem for path in SHIPPED), "drop", "groups", "folds"])
def test_generated_source_is_the_golden_one(name, request):
    path, text = GOLDEN / f"{name}.triton.txt", Kernels(compile_named(name)).text
    if request.config.getoption("--update-golden", default=False):
        path.write_text(text)
    assert path.read_text() == text


def test_sizes_are_plain_arguments_so_that_none_compiles_anew():
    text = Kernels(compile_named("terngrad")).text
    assert text.count('numel: "i32"') == text.count("@triton.jit(do_not_specialize=") > 0


def test_a_registered_function_and_operator_run_on_the_device():
    from compll.test_operators import CUBE, REVERSE, SOURCE
    from penstock.compll.functions import FUNCTIONS
    from penstock.compll.operators import OPERATORS

    functions, operators = FUNCTIONS | {"cube": CUBE}, OPERATORS | {"reverse": REVERSE}
    program = frontend.compile_source(SOURCE, "cubes.cll", functions=functions, operators=operators)
    values = np.arange(-700, 700, dtype=np.float32) / 7
    kernels = TritonKernels(program, DEVICE, functions, operators)
    payload = kernels.encode(on_device(values), {})
    assert np.array_equal(payload.cpu().numpy().view(np.float32), (values * values * values)[::-1])
    assert np.array_equal(kernels.decode(payload, values.size, {}).cpu().numpy(), values * values * values)
