"""Exact selection against a stable sort of the magnitudes: ties, signs, denormals, infinities, NaN and every k."""

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.compll import select
from penstock.errors import PenstockError

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
FEW_VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, float("inf"), float("nan")])


def stable_sort(values, k):
    """The oracle: sort by magnitude bits, largest first, equal ones in index order, and keep the first k."""
    magnitudes = (values.view(np.int32) & 0x7FFFFFFF).astype(np.int64)
    return np.sort(np.argsort(-magnitudes, kind="stable")[:k])


@settings(deadline=None)  # the first case may compile
@given(st.data(), st.sampled_from([FLOATS, FEW_VALUES]))
def test_selection_is_what_a_stable_sort_keeps(data, elements):
    values = data.draw(hnp.arrays(np.float32, st.integers(0, 300), elements=elements))
    k = data.draw(st.integers(0, values.size))
    assert np.array_equal(select.largest_magnitudes(values, k), stable_sort(values, k))


LARGE = 300_001
RNG = np.random.default_rng(5)
SHAPES = {
    "normal": RNG.standard_normal(LARGE),
    "heavy tail": RNG.standard_cauchy(LARGE),
    "rising": np.arange(LARGE),
    "falling": -np.arange(LARGE)[::-1],
    "all equal": np.full(LARGE, -2.0),
    "all zero": np.zeros(LARGE),
    "three values": RNG.integers(-1, 2, LARGE),
    "mostly zero": np.where(RNG.random(LARGE) < 1e-3, RNG.standard_normal(LARGE), 0.0),
    "denormal": RNG.standard_normal(LARGE) * 1e-40,
    # every element the sample looks at is small, so the guessed threshold is far too low
    "hidden from the sample": np.where(np.arange(LARGE) % (LARGE // select.SAMPLE) == 0, 1e-3, 1 + RNG.random(LARGE)),
    # and here every one is large, so it is far too high
    "seen by the sample alone": np.where(np.arange(LARGE) % (LARGE // select.SAMPLE) == 0, 1 + RNG.random(LARGE), 1e-3),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("k", [1, 2, 63, 300, 3000, 100_000, LARGE - 1, LARGE])
def test_large_tensors_of_every_shape_are_selected_exactly(shape, k):
    values = SHAPES[shape].astype(np.float32)
    assert np.array_equal(select.largest_magnitudes(values, k), stable_sort(values, k))


def test_nan_ranks_above_infinity_and_infinity_above_the_rest():
    values = np.array([1, np.inf, 3e38, np.nan, -np.inf], np.float32)
    assert select.largest_magnitudes(values, 1).tolist() == [3]
    assert select.largest_magnitudes(values, 3).tolist() == [1, 3, 4]


def test_an_empty_tensor_and_k_zero_select_nothing():
    assert select.largest_magnitudes(np.empty(0, np.float32), 0).size == 0
    assert select.largest_magnitudes(np.ones(3, np.float32), 0).size == 0


@pytest.mark.parametrize("k", [-1, 4])
def test_a_k_outside_the_tensor_is_refused(k):
    with pytest.raises(PenstockError, match=r"cannot select k = -?\d of 3 elements; choose 0 <= k <= 3"):
        select.largest_magnitudes(np.ones(3, np.float32), k)


@pytest.mark.parametrize("values", [np.ones(4), np.ones((2, 2), np.float32), np.ones(8, np.float32)[::2]])
def test_only_contiguous_float32_vectors_are_taken(values):
    with pytest.raises(PenstockError, match="contiguous float32 vectors"):
        select.largest_magnitudes(values, 1)


def test_more_elements_than_32_bit_indices_reach_are_refused():
    with pytest.raises(PenstockError, match="split the tensor into partitions"):
        select.check_selection(2**31, 5)


def test_examples_in_the_docstrings_hold():
    assert doctest.testmod(select).failed == 0
