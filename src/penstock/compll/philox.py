"""The one random generator of all back ends: Philox4x32, counter-based, so element i's number depends on i alone.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC '11). A counter of four words and a
key of two words go in, four random words come out; nothing is carried from one call to the next, so a back end may
visit elements in any order, in blocks, or on a GPU, and every bit agrees.

The contract that `reference`, `numba` and `triton` share:

- The key is the call's seed, an unsigned 64-bit integer: low word first.
- Element i takes word i % 4 of counter (i // 4 low word, i // 4 high word, stream, 0). The elements of one
  counter are neighbours, so a thread that holds four floats, or a byte that packs four two-bit values, needs one call.
- `stream` numbers the `random` expressions of a program from 0 in source order, so two of them are independent.
- A word becomes a float32 in [0, 1) as (word >> 8) * 2^-24: 24 bits, exact, every value equally likely.
- `random<float>(low, high)` is low + u * (high - low), each operation rounded to float32 (no fused multiply-add).

Ten rounds, as everywhere else (cuRAND, torch, Triton's default); the paper finds seven the least that passes all of
BigCrush. Seven would save 2 ms of the 12 that a TernGrad encode of 64 MB takes on one core: not worth being the odd one
out. In Triton the same numbers come from `tl.philox(seed, low, high, stream, 0)`.

`philox4x32` is written so that numpy arrays run it as it stands and numba compiles it as it stands:

    philox4x32 = numba.njit(inline="always")(penstock.compll.philox.philox4x32)
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10
UNIFORM_SHIFT = 8  # bits of a word that a float32 in [0, 1) cannot hold
UNIFORM_SCALE = np.float32(2.0**-24)

# Module constants of exact width: under numba a bare Python integer would widen the arithmetic to 64 bits.
_MULTIPLY_A = np.uint64(0xD2511F53)
_MULTIPLY_B = np.uint64(0xCD9E8D57)
_WEYL_A = np.uint64(0x9E3779B9)
_WEYL_B = np.uint64(0xBB67AE85)
_WORD_BITS = np.uint64(32)


def philox4x32(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Return the four random words of counter (c0, c1, c2, c3) under key (k0, k1); all are uint32.

    >>> [hex(word) for word in philox4x32(*(np.uint32(0),) * 6)]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    for _ in range(ROUNDS):
        a = _MULTIPLY_A * np.uint64(c0)
        b = _MULTIPLY_B * np.uint64(c2)
        c0, c1 = np.uint32(b >> _WORD_BITS) ^ c1 ^ k0, np.uint32(b)
        c2, c3 = np.uint32(a >> _WORD_BITS) ^ c3 ^ k1, np.uint32(a)
        k0 = np.uint32(np.uint64(k0) + _WEYL_A)
        k1 = np.uint32(np.uint64(k1) + _WEYL_B)
    return c0, c1, c2, c3


def split(word: int) -> tuple[np.uint32, np.uint32]:
    """Return an unsigned 64-bit integer (a seed, or i // 4) as its low and its high word.

    >>> split(0x1_0000_0002)
    (np.uint32(2), np.uint32(1))
    """
    assert 0 <= word < 1 << 64, f"{word} is not an unsigned 64-bit integer"
    return np.uint32(word & 0xFFFFFFFF), np.uint32(word >> 32)


def words(seed: int, numel: int, stream: int = 0, first: int = 0) -> NDArray[np.uint32]:
    """Return the random words of elements first .. first + numel - 1."""
    if numel == 0:
        return np.empty(0, np.uint32)
    counters = np.arange(first // 4, (first + numel - 1) // 4 + 1, dtype=np.uint64)
    low, high = np.uint32(counters), np.uint32(counters >> _WORD_BITS)
    zero = np.zeros_like(low)
    fours = np.stack(philox4x32(low, high, zero + np.uint32(stream), zero, *split(seed)), axis=1)
    return np.asarray(fours.reshape(-1)[first % 4 : first % 4 + numel], np.uint32)


def uniform(seed: int, numel: int, stream: int = 0, first: int = 0) -> NDArray[np.float32]:
    """Return the uniform float32 numbers in [0, 1) of elements first .. first + numel - 1.

    >>> uniform(seed=7, numel=6)[4:] == uniform(seed=7, numel=2, first=4)
    array([ True,  True])
    """
    return (words(seed, numel, stream, first) >> np.uint32(UNIFORM_SHIFT)).astype(np.float32) * UNIFORM_SCALE
