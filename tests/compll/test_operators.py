"""New functions and operators are registered from Python: their meaning and their lowerings."""

import numpy as np
import pytest

from penstock.compll.backends.numba.backend import NumbaKernels
from penstock.compll.backends.reference import ReferenceKernels
from penstock.compll.frontend.source import compile_source
from penstock.compll.functions import FUNCTIONS, Function
from penstock.compll.operators import OPERATORS, Operator
from penstock.compll.types import FLOAT
from penstock.errors import CompileError

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
