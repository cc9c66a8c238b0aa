"""New functions and operators are registered from Python: their meaning and their lowerings."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.codecs.registry import codec_names, fingerprint
from penstock.compll.backends.numba.backend import NumbaKernels
from penstock.compll.backends.reference import ReferenceKernels
from penstock.compll.frontend.source import compile_source
from penstock.compll.functions import FUNCTIONS, Function
from penstock.compll.operators import OPERATORS, Operator, register
from penstock.compll.types import FLOAT
from penstock.errors import CodecError, CompileError
from penstock.exchange.compression import Compression
from penstock.exchange.exchange import Exchange
from penstock.reproduce.hipress import OTHER_OPERATORS, lines_of, operators_of
from penstock.runtime.communicator import Communicator
from runtime.threads import run_ranks

CUBE = Function(
    "cube",
    1,
    FLOAT,
    numpy=lambda x: x * x * x,
    numba="def cube(x):\n    return x * x * x\n",
    triton="def cube(x):\n    return x * x * x\n",
)
REVERSE = Operator(
    "reverse",
    1,
    0,
    numpy=lambda values: values[::-1].copy(),
    numba="def reverse(values):\n    return values[::-1].copy()\n",
    triton="def reverse(values):\n    return values.flip(0)\n",
)
SOURCE = """
float third(float x) { return cube(x); }
void encode(float* gradient, uint8* compressed) { compressed = concat(reverse(map(gradient, third))); }
void decode(uint8* compressed, float* gradient) {
    float* values = extract(compressed);
    gradient = reverse(values);
}
"""


def test_a_registered_function_and_operator_work_on_reference_and_numba():
    functions, operators = FUNCTIONS | {"cube": CUBE}, OPERATORS | {"reverse": REVERSE}
    program = compile_source(SOURCE, "cubes.cll", functions=functions, operators=operators)
    values = np.arange(-700, 700, dtype=np.float32) / 7
    for kernels in (ReferenceKernels(program, functions, operators), NumbaKernels(program, functions, operators)):
        payload = kernels.encode(values, {})
        assert np.array_equal(payload.view(np.float32), (values * values * values)[::-1])
        assert np.array_equal(kernels.decode(payload, values.size, {}), values * values * values)


def test_without_registering_them_the_names_are_unknown():
    with pytest.raises(CompileError, match="unknown function 'cube'"):
        compile_source(SOURCE)


def test_a_fold_with_a_function_of_the_program_reduces():
    source = """
    float scale;
    float maxAbs(float a, float b) { return abs(a) > abs(b) ? abs(a) : abs(b); }
    float give(float x) { return scale; }
    void encode(float* gradient, uint8* compressed) { compressed = concat(reduce(gradient, maxAbs), gradient); }
    void decode(uint8* compressed, float* gradient) {
        scale = extract(compressed);
        float* g = extract(compressed);
        gradient = map(g, give);
    }
    """
    program = compile_source(source)
    values = np.random.default_rng(0).standard_normal(3000).astype(np.float32)
    for kernels in (ReferenceKernels(program), NumbaKernels(program)):
        payload = kernels.encode(values, {})
        assert payload[:4].view(np.float32)[0] == np.abs(values).max()


@pytest.mark.parametrize(
    ("order", "wanted"),
    [("smaller", [-3, -1, 0, 2]), ("greater", [2, 0, -1, -3]), ("far", [0, -1, 2, -3])],
)
def test_sort_takes_an_order_or_a_key(order, wanted):
    source = f"""
    float far(float x) {{ return abs(x); }}
    void encode(float* gradient, uint8* compressed) {{ compressed = concat(sort(gradient, {order})); }}
    void decode(uint8* compressed, float* gradient) {{ float* g = extract(compressed); gradient = map(g, far); }}
    """
    program = compile_source(source)
    values = np.array([2, -3, 0, -1], np.float32)
    for kernels in (ReferenceKernels(program), NumbaKernels(program)):
        assert kernels.encode(values, {}).view(np.float32).tolist() == wanted


@pytest.fixture
def registered():
    """Register for one test."""
    before = dict(FUNCTIONS), dict(OPERATORS)
    register(CUBE, REVERSE)
    yield
    for table, known in zip((FUNCTIONS, OPERATORS), before, strict=True):
        for name in table.keys() - known.keys():
            del table[name]


def test_a_registered_operator_reaches_training(registered, tmp_path):
    """Gradients are averaged by a codec that calls it, over ranks, and the codec is part of what they compare."""
    path = tmp_path / "mirrored.cll"
    path.write_text(SOURCE.replace("return cube(x);", "return cube(x) * 0 + x;"))

    def rank(transport):
        exchange = Exchange(Communicator(transport, timeout_seconds=120), Compression(str(path)))
        values = np.arange(6, dtype=np.float32) * (1 + transport.rank)
        exchange.begin()
        exchange.wait(exchange.start(exchange.bucket(["a"], [6]), values))
        exchange.close()
        return values

    for found in run_ranks(2, rank):
        np.testing.assert_array_equal(found, 1.5 * np.arange(6, dtype=np.float32))
    kept = fingerprint(str(path))
    OPERATORS["reverse"] = replace(REVERSE, numba=REVERSE.numba.replace("[::-1]", "[0::]"))
    assert fingerprint(str(path)) != kept


def test_registering_again_is_nothing_and_another_text_under_a_name_is_refused(registered):
    register(CUBE, REVERSE)
    with pytest.raises(CodecError, match="'reverse' is registered with another text; wanted another name"):
        register(replace(REVERSE, triton="def reverse(v):\n    return v\n"))
    with pytest.raises(CodecError, match="'abs' is registered with another text"):
        register(replace(CUBE, name="abs"))
    with pytest.raises(CodecError, match="wanted a name such as reverse"):
        register(replace(CUBE, name="two words"))


def test_the_page_of_the_language_counts_operators_and_lines_as_they_are():
    text = (Path(__file__).parents[2] / "docs" / "language.md").read_text()
    for name in codec_names():
        common, beyond = operators_of(name)
        logic, functions = lines_of(name)
        row = f"| {name} | {', '.join(common)} | {', '.join(beyond) or '-'} | {logic} | {functions} |"
        assert row in text
    assert set(OTHER_OPERATORS) | {"sort", "sort_by", "nth", "running"} == set(
        OPERATORS
    )  # `sort_by`, ...: forms of sort, scan
