"""Random numbers in generated numba kernels, as `philox.py` defines them."""

# mypy: disable-error-code="call-arg,call-overload,arg-type,var-annotated"
# numba's types are called as functions inside compiled code, which its annotations do not know.
from typing import Any

import numpy as np
from numba import float32, int32, int64, njit, uint32, uint64

from penstock.compll.backends.numba.bits import helper
from penstock.compll.philox import philox4x32

_SHIFT = np.uint32(8)
_SCALE = np.float32(2.0**-24)
_WORD = np.uint64(32)
_philox = njit(inline="always")(philox4x32)


@njit(nogil=True)
def fill_words(words: Any, size: Any, seed_low: Any, seed_high: Any, stream: Any, start: Any) -> None:
    """The random words of elements start .. start + size - 1; `start` is a multiple of 4, and so is the room."""
    first = uint64(start // 4)
    high, low = uint32(first >> _WORD), uint32(first)  # a block does not cross a multiple of 2^34 elements
    for i in range((size + 3) // 4):
        a, b, c, d = _philox(uint32(low + uint32(i)), high, uint32(stream), uint32(0), seed_low, seed_high)
        words[4 * i] = a
        words[4 * i + 1] = b
        words[4 * i + 2] = c
        words[4 * i + 3] = d


@njit(nogil=True)
def fill_uniform(numbers: Any, size: Any, seed_low: Any, seed_high: Any, stream: Any, start: Any) -> None:
    """The uniform numbers in [0, 1) of the same elements."""
    first = uint64(start // 4)
    high, low = uint32(first >> _WORD), uint32(first)
    for i in range((size + 3) // 4):
        a, b, c, d = _philox(uint32(low + uint32(i)), high, uint32(stream), uint32(0), seed_low, seed_high)
        numbers[4 * i] = float32(int32(a >> _SHIFT)) * _SCALE
        numbers[4 * i + 1] = float32(int32(b >> _SHIFT)) * _SCALE
        numbers[4 * i + 2] = float32(int32(c >> _SHIFT)) * _SCALE
        numbers[4 * i + 3] = float32(int32(d >> _SHIFT)) * _SCALE


@helper
def random_int32(word: Any, low: Any, high: Any) -> Any:
    """A random integer in [low, high) from a random word."""
    span = uint64(int64(high) - int64(low))
    return int32(int64(low) + int64((uint64(word) * span) >> _WORD))


@helper
def first_word(seed_low: Any, seed_high: Any, stream: Any) -> Any:
    """The random word of element 0."""
    return _philox(uint32(0), uint32(0), uint32(stream), uint32(0), seed_low, seed_high)[0]


@helper
def first_uniform(seed_low: Any, seed_high: Any, stream: Any) -> Any:
    """The uniform number of element 0."""
    return float32(int32(first_word(seed_low, seed_high, stream) >> _SHIFT)) * _SCALE
