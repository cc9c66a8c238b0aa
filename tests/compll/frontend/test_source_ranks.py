"""Sorts that answer one question become selections, and the answer is the same."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import penstock.compll
from penstock.compll.frontend.source import compile_file, compile_source
from penstock.compll.ir import Apply
from penstock.compll.operators import OPERATORS
from penstock.compll.select import _kth_key

ALGORITHMS = Path(penstock.compll.__file__).parent / "algorithms"
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
PROGRAM = """
param P {{ float density = 0.1 in [0, 1]; }}
float threshold;
float* some;
uint1 isLarge(float x) {{ return x >= threshold; }}
float back(uint1 x) {{ return x ? threshold : 0; }}
void encode(float* gradient, uint8* compressed, P params) {{
    some = sort(sample(gradient, 1000), greater);
    threshold = {threshold};
    compressed = concat(threshold, map(gradient, isLarge));
}}
void decode(uint8* compressed, float* gradient, P params) {{
    threshold = extract(compressed);
    uint1* bits = extract(compressed);
    gradient = map(bits, back);
}}
"""


def operators_of(program):
    return [item.operator for item in program.encode.statements if isinstance(item, Apply)]


@pytest.mark.parametrize("name", ["dgc", "graddrop"])
def test_a_sampled_threshold_is_not_sorted_for(name):
    assert "nth" in operators_of(compile_file(ALGORITHMS / f"{name}.cll"))
    assert "sort" not in operators_of(compile_file(ALGORITHMS / f"{name}.cll"))


@pytest.mark.parametrize(
    ("threshold", "operator"),
    [
        ("some[7]", "nth"),
        ("some[(int32) (some.size * params.density)]", "nth"),
        ("some[3] + some[5]", "sort"),  # two questions
        ("reduce(some, sum)", "sort"),
        ("some[(int32) gradient[0]]", "sort"),  # a place that only the data know
    ],
)
def test_a_sort_stays_where_more_is_asked_of_it(threshold, operator):
    assert operators_of(compile_source(PROGRAM.format(threshold=threshold))) == ["sample", operator]


@given(arrays.arrays(np.float32, st.integers(1, 50), elements=FINITE), st.integers(-3, 60), st.booleans())
def test_the_element_found_is_the_sorted_vectors(values, index, descending):
    ordered = np.sort(values)[::-1] if descending else np.sort(values)
    found = OPERATORS["nth"].numpy(values, index, int(descending))
    assert found.tolist() == [ordered[min(max(index, 0), values.size - 1)]]


def test_an_empty_vector_has_no_element():
    assert OPERATORS["nth"].numpy(np.empty(0, np.float32), 3, 1).size == 0


@given(arrays.arrays(np.int32, st.integers(1, 50)), st.data())
def test_the_radix_select_finds_the_kth_largest_key(keys, data):
    k = data.draw(st.integers(1, keys.size))
    assert _kth_key(keys, k) == np.sort(keys)[-k]
