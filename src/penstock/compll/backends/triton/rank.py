"""The n-th element of a sorted vector on the GPU, without sorting it: a radix select, three launches.

Each launch counts one digit of the elements that share the digits found so far; the last program to finish finds the
digit of the element wanted. Floats are ordered by an integer that sorts as they do.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from penstock.compll.backends.triton.prelude import as_bits, as_float, is_last
from penstock.compll.backends.triton.select import (
    GUESS_BINS,
    KNOWN,
    PREFIX,
    REMAINING,
    TICKET,
    actual,
    resolve,
)

TILE = 2048
DIGITS = ((21, 2048), (10, 2048), (0, 1024))  # (shift, values) of each digit, the highest first


@triton.jit
def order_key(value):
    """Return an int32 that sorts as the float does."""
    bits = as_bits(value)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["numel", "index"])
def rank_digit(
    x_ptr, size_ptr, out_ptr, count_ptr, histogram_ptr, state_ptr, numel: "i32", index: "i32",
    COUNTED: tl.constexpr, DESCENDING: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr, SIGN: tl.constexpr,
    MASK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The next digit of the element wanted; SIGN is the digit's bit that is the sign, in the first one.

    MASK is the digit's bits as an int32.
    """
    size = actual(size_ptr, numel, COUNTED)
    place = tl.maximum(tl.minimum(index, size - 1), 0)
    known = tl.full([], 0, tl.int32)
    prefix = tl.full([], 0, tl.int32)
    remaining = place + 1 if DESCENDING else size - place
    if SIGN == 0:
        known, prefix = tl.load(state_ptr + KNOWN), tl.load(state_ptr + PREFIX)
        remaining = tl.load(state_ptr + REMAINING)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    key = order_key(tl.load(x_ptr + at, mask=at < size, other=0.0))
    shared = (at < size) & ((key & known) == prefix)
    histogram = tl.histogram(((key >> SHIFT) & (BINS - 1)) ^ SIGN, BINS, mask=shared)
    tl.atomic_add(histogram_ptr + tl.arange(0, BINS), histogram, mask=histogram != 0, sem="relaxed")
    if is_last(state_ptr + TICKET):
        found, rank = resolve(histogram_ptr, remaining, BINS)
        prefix = prefix | ((found ^ SIGN) << SHIFT)
        tl.store(state_ptr + REMAINING, rank)
        tl.store(state_ptr + KNOWN, known | MASK)
        tl.store(state_ptr + PREFIX, prefix)
        if SHIFT == 0:
            tl.store(out_ptr, as_float(prefix ^ ((prefix >> 31) & 0x7FFFFFFF)) + 0.0)
            tl.store(count_ptr, tl.minimum(size, 1))


def nth_element(values: Any, size: Any, index: int, descending: bool, count: Any, scratch: Any, start: Any) -> Any:
    """Return one element in device memory; `count` is made 1, or 0 where the vector is empty.

    `size` is a one-element int32 tensor with how many of `values` count, or None for all of them; `scratch` is as in
    `select`.
    """
    numel, device = values.numel(), values.device
    found = torch.empty(1, dtype=torch.float32, device=device)
    if numel == 0:
        count.zero_()
        return found
    histogram, state = scratch[:GUESS_BINS], scratch[GUESS_BINS:]
    counted, sized = size is not None, count if size is None else size
    arguments = (values, sized, found, count, histogram, state, numel, index)
    for shift, bins in DIGITS:
        is_first = shift == DIGITS[0][0]
        sign, mask = (bins // 2, -(1 << shift)) if is_first else (0, (bins - 1) << shift)
        constants = (counted, descending, bins, shift, sign, mask, TILE)
        start(rank_digit, triton.cdiv(numel, TILE), arguments, constants, 8)
    return found
