"""Merge kernels against numpy and torch, over special values and every bit pattern."""

import threading
import time
import warnings
from collections import Counter

import numpy as np
import pytest

from penstock.errors import StrategyError
from penstock.runtime.reduce import bits, merge_kernel
from penstock.runtime.views import DTYPES

PLAIN = [name for name in DTYPES if name != "bfloat16"]


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("numel", [0, 1, 7, 1000])
def test_a_merge_equals_numpys_sum_bit_for_bit(dtype: str, numel: int) -> None:
    rng = np.random.default_rng(numel)
    left, right = (rng.normal(0, 50, numel).astype(DTYPES[dtype]) for _ in range(2))
    wanted = left + right
    merge_kernel(dtype)(bits(left, dtype), bits(right, dtype))
    assert left.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_infinities_and_nan_are_summed_without_a_warning(dtype: str) -> None:
    infinity = {"float16": 0x7C00, "bfloat16": 0x7F80}.get(dtype)
    left = np.full(600, np.inf, dtype) if infinity is None else np.full(600, infinity, np.uint16)
    right = -left if infinity is None else left | np.uint16(0x8000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merge_kernel(dtype)(left, right)
    sums = left if infinity is None else (left & np.uint16(0x7FFF)) > infinity
    assert np.isnan(sums).all() if infinity is None else sums.all()


def every_pair_of_16_bits() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    special = np.array(
        [0x0000, 0x8000, 0x7C00, 0xFC00, 0x7F80, 0xFF80, 0x7E00, 0x7FC0, 0x0001, 0x7BFF, 0x7F7F], np.uint16
    )
    left = np.concatenate([np.arange(65536, dtype=np.uint16)] * len(special))
    right = np.repeat(special, 65536)
    random = [rng.integers(0, 65536, 1 << 19, dtype=np.uint16) for _ in range(2)]
    return np.concatenate([left, random[0]]), np.concatenate([right, random[1]])


def test_float16_rounds_to_nearest_even_and_keeps_nan_for_all_bit_patterns() -> None:
    left, right = every_pair_of_16_bits()
    with np.errstate(all="ignore"):
        wanted = left.view(np.float16) + right.view(np.float16)
    merge_kernel("float16")(left, right)
    np.testing.assert_array_equal(left.view(np.float16), wanted)


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan_for_all_bit_patterns() -> None:
    torch = pytest.importorskip("torch")
    left, right = every_pair_of_16_bits()
    wanted = torch.from_numpy(left.copy()).view(torch.bfloat16) + torch.from_numpy(right).view(torch.bfloat16)
    merge_kernel("bfloat16")(left, right)
    found = torch.from_numpy(left).view(torch.bfloat16)
    assert torch.equal(found.isnan(), wanted.isnan())
    keep = ~wanted.isnan()
    assert torch.equal(found.view(torch.int16)[keep], wanted.view(torch.int16)[keep])


def test_an_unknown_element_type_is_named() -> None:
    with pytest.raises(StrategyError, match="element type 'complex64'; wanted one of float32, float64"):
        merge_kernel("complex64")


def test_kernels_release_the_interpreter_lock() -> None:
    """While one call lasts another thread has many turns; with the lock held it would have one between two calls."""
    kernel = merge_kernel("float64")
    left, right = np.zeros(1 << 24), np.zeros(1 << 24)
    kernel(left[:1], right[:1])  # compiled, which Python does with turns for everybody
    calls, enough = [0], threading.Event()

    def merge() -> None:
        while calls[0] < 200 and not enough.is_set():
            calls[0] += 1
            kernel(left, right)
        enough.set()

    thread = threading.Thread(target=merge)
    thread.start()
    turns: Counter[int] = Counter()
    while not enough.is_set():
        turns[calls[0]] += 1
        if turns[calls[0]] > 20:
            enough.set()
        time.sleep(0)
    thread.join()
    assert max(turns.values()) > 20, turns
