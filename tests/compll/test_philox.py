"""Philox against its authors' published test vectors, numpy's own Philox, and numba's reading of the same source."""

import doctest

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.compll import philox

SEEDS = st.integers(0, 2**64 - 1)

# Random123, kat_vectors: "philox4x32 10", counter, key, answer
KNOWN_ANSWERS = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.fixture(scope="module")
def compiled():
    return numba.njit(philox.philox4x32)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_the_authors_test_vectors_come_out(counter, key, answer):
    assert philox.philox4x32(*map(np.uint32, counter + key)) == answer


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_numba_compiles_the_same_source_to_the_same_words(compiled, counter, key, answer):
    assert compiled(*map(np.uint32, counter + key)) == answer


@given(SEEDS, st.integers(0, 3), st.integers(0, 40), st.integers(0, 40))
def test_an_elements_number_does_not_depend_on_where_the_block_starts(seed, stream, first, numel):
    whole = philox.words(seed, first + numel, stream)
    assert np.array_equal(whole[first:], philox.words(seed, numel, stream, first))


@given(SEEDS)
def test_element_i_takes_word_i_mod_4_of_counter_i_div_4(seed):
    key = philox.split(seed)
    zero = np.uint32(0)
    expected = [word for c in range(3) for word in philox.philox4x32(np.uint32(c), zero, np.uint32(5), zero, *key)]
    assert philox.words(seed, 10, stream=5).tolist() == expected[:10]


def test_counters_beyond_32_bits_use_the_high_word():
    far = 4 * (2**32 + 3)
    expected = philox.philox4x32(np.uint32(3), np.uint32(1), np.uint32(0), np.uint32(0), *philox.split(9))
    assert philox.words(9, 4, first=far).tolist() == list(expected)


def test_streams_and_seeds_differ():
    a, b, c = philox.words(1, 64), philox.words(1, 64, stream=1), philox.words(2, 64)
    assert not (a == b).any()
    assert not (a == c).any()


def test_uniform_numbers_fill_the_unit_interval_evenly():
    u = philox.uniform(seed=3, numel=1 << 20)
    assert u.dtype == np.float32
    assert u.min() >= 0
    assert u.max() < 1
    counts = np.histogram(u, bins=256, range=(0, 1))[0]
    chi_square = ((counts - 4096.0) ** 2 / 4096).sum()
    assert 170 < chi_square < 350, "255 degrees of freedom: five standard deviations are 22.6 each"


def test_an_empty_tensor_needs_no_numbers():
    assert philox.uniform(seed=1, numel=0).shape == (0,)


def test_examples_in_the_docstrings_hold():
    assert doctest.testmod(philox).failed == 0
