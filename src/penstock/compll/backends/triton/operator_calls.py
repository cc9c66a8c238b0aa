"""Whole-vector operators on the GPU: torch and a few kernels, none of which waits for the device.

A counted vector is a buffer of the most elements it can have, and its size an int32 in device memory; what lies behind
the size is never looked at. `OPERATORS` has one function for each operator of `compll.operators`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from penstock.compll.backends.triton import select_kernels
from penstock.compll.backends.triton.prelude import WRONG_INDEX, as_bits, as_float, is_last, words_at
from penstock.compll.backends.triton.select_kernels import (
    GUESS_BINS,
    KNOWN,
    PREFIX,
    REMAINING,
    TICKET,
    actual,
    resolve,
)
from penstock.compll.ir import Apply

TILE = 1024


@dataclass(frozen=True, slots=True)
class Operand:
    """A vector on the device."""

    values: Any  # a tensor of the most elements it can have
    size: Any  # a one-element int32 tensor, or None where all elements count


@dataclass(frozen=True, slots=True)
class Call:
    """What an operator is given."""

    step: Apply
    operands: tuple[Operand, ...]
    scalars: tuple[int, ...]
    seed: int
    scratch: Any  # zeros: `select` says how many
    status: Any
    start: Callable[..., None]  # launches a kernel: (kernel, programs, arguments, constants, warps)
    size: Any = None  # where the size of the result is wanted, if it is counted; a kernel writes it on its way

    def counted(self, size: Any) -> Any:
        """Return where an operator writes its result's size; `size` says whether it must be somewhere."""
        if self.size is None and size is not None:
            return torch.empty(1, dtype=torch.int32, device=size.device)
        return self.size


def nth(call: Call) -> Operand:
    """`nth(v, i)`: element i of `v` sorted, without sorting it."""
    vector, (index, descending) = call.operands[0], call.scalars
    assert call.size is not None
    found = nth_element(vector.values, vector.size, index, bool(descending), call.size, call.scratch, call.start)
    return Operand(found, call.size)


def select_topk(call: Call) -> Operand:
    """`topk(v, k)`: indices of the k largest magnitudes."""
    vector, k = call.operands[0], max(0, min(call.scalars[0], call.operands[0].values.numel()))
    count = call.counted(vector.size)
    chosen = select_kernels.largest_magnitudes(vector.values, k, vector.size, call.scratch, call.start, count)
    return Operand(chosen, count)


@triton.jit(do_not_specialize=["numel", "wanted", "seed", "stream"])
def sample_kernel(
    x_ptr, size_ptr, out_ptr, count_ptr, numel: "i32", wanted: "i32", seed: "u64", stream: "i32",
    COUNTED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One element from each of `wanted` equal stretches."""
    size = select_kernels.actual(size_ptr, numel, COUNTED)
    count = tl.maximum(tl.minimum(wanted, size), 0)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    whole = tl.maximum(count, 1).to(tl.int64)
    first = at.to(tl.int64) * size // whole
    width = (at.to(tl.int64) + 1) * size // whole - first
    word = words_at(seed, stream, at).to(tl.int64)
    tl.store(out_ptr + at, tl.load(x_ptr + first + ((word * width) >> 32), mask=at < count, other=0), mask=at < count)
    if tl.program_id(0) == 0:
        tl.store(count_ptr, count)


def draw_sample(call: Call) -> Operand:
    """`sample(v, n)`: n elements, one at random from each of n equal stretches."""
    vector, wanted = call.operands[0], max(0, min(call.scalars[0], call.operands[0].values.numel()))
    numel, device = vector.values.numel(), vector.values.device
    drawn = torch.empty(wanted, dtype=vector.values.dtype, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device) if call.size is None else call.size
    counted, size = vector.size is not None, count if vector.size is None else vector.size
    arguments = (vector.values, size, drawn, count, numel, wanted, call.seed, call.step.stream)
    call.start(sample_kernel, max(1, triton.cdiv(wanted, TILE)), arguments, (counted, TILE))
    return Operand(drawn, count if counted or call.size is not None else None)


@triton.jit(do_not_specialize=["length", "numel"])
def scatter_kernel(
    index_ptr, value_ptr, size_ptr, out_ptr, status_ptr, length: "i32", numel: "i32",
    COUNTED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Put values at indices; an index outside is reported and skipped."""
    size = select_kernels.actual(size_ptr, length, COUNTED)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    index = tl.load(index_ptr + at, mask=at < size, other=0)
    inside = (index >= 0) & (index < numel)
    if tl.max(((at < size) & (inside == 0)).to(tl.int32), axis=0) != 0:
        tl.atomic_or(status_ptr, WRONG_INDEX)
    value = tl.load(value_ptr + at, mask=at < size, other=0)
    tl.store(out_ptr + index, value.to(out_ptr.dtype.element_ty), mask=(at < size) & inside)


def scatter(call: Call) -> Operand:
    """`scatter(i, v, n)`: zeros, and v[j] at i[j]."""
    index, values = call.operands[0], call.operands[1].values
    length = index.values.numel()
    out = torch.zeros(call.scalars[0], dtype=values.dtype, device=values.device)
    size = index.values if index.size is None else index.size
    arguments = (index.values, values, size, out, call.status, length, out.numel())
    call.start(scatter_kernel, max(1, triton.cdiv(length, TILE)), arguments, (index.size is not None, TILE))
    return Operand(out, None)


def _hidden(vector: Operand, low: bool) -> Any:
    """Return a vector with what lies behind its size made smallest or greatest, so that it sorts last."""
    if vector.size is None:
        return vector.values
    info = torch.finfo(vector.values.dtype) if vector.values.is_floating_point() else torch.iinfo(vector.values.dtype)
    limit = (
        (float("-inf") if low else float("inf")) if vector.values.is_floating_point() else (info.min, info.max)[not low]
    )
    at = torch.arange(vector.values.numel(), device=vector.values.device, dtype=torch.int32)
    return torch.where(at < vector.size, vector.values, limit)


def sort(call: Call) -> Operand:
    """`sort(v, smaller)` or `sort(v, greater)`."""
    descending = bool(call.scalars[0])
    ordered = torch.sort(_hidden(call.operands[0], descending), descending=descending).values
    return Operand(ordered, call.operands[0].size)


def sort_by(call: Call) -> Operand:
    """`sort(v, f)`: by f(v[i]), equal ones in order."""
    keys, values = call.operands
    descending = bool(call.scalars[0])
    order = torch.sort(_hidden(keys, descending), descending=descending, stable=True).indices
    return Operand(values.values[order], values.size)


def scan(call: Call) -> Operand:
    """`scan(v, sum)`: running totals, which wrap as int32 does."""
    vector = call.operands[0]
    return Operand(torch.cumsum(vector.values, 0, dtype=torch.int32), vector.size)


@triton.jit
def larger(a, b):
    """Return the larger of two."""
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["numel"])
def peak_kernel(x_ptr, peak_ptr, numel: "i32", TILE: tl.constexpr):
    """The greatest of each tile."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(peak_ptr + tl.program_id(0), tl.max(tl.load(x_ptr + at, mask=at < numel, other=-2147483648), axis=0))


@triton.jit(do_not_specialize=["numel"])
def running_kernel(x_ptr, peak_ptr, out_ptr, numel: "i32", TILE: tl.constexpr):
    """The greatest so far, from the peaks of the tiles before."""
    before = tl.full([TILE], -2147483648, tl.int32)
    for first in tl.range(0, tl.program_id(0), TILE):
        tile = first + tl.arange(0, TILE)
        before = tl.maximum(before, tl.load(peak_ptr + tile, mask=tile < tl.program_id(0), other=-2147483648))
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    value = tl.load(x_ptr + at, mask=at < numel, other=-2147483648)
    tl.store(out_ptr + at, tl.maximum(tl.associative_scan(value, 0, larger), tl.max(before, axis=0)), mask=at < numel)


def running(call: Call) -> Operand:
    """`scan(v, greater)`: the greatest so far. `torch.cummax` takes a hundred times as long."""
    vector = call.operands[0]
    numel = vector.values.numel()
    tiles = max(1, triton.cdiv(numel, 4 * TILE))
    peaks = torch.empty(tiles, dtype=torch.int32, device=vector.values.device)
    out = torch.empty_like(vector.values)
    call.start(peak_kernel, tiles, (vector.values, peaks, numel), (4 * TILE,))
    call.start(running_kernel, tiles, (vector.values, peaks, out, numel), (4 * TILE,))
    return Operand(out, vector.size)


OPERATORS: dict[str, Callable[[Call], Operand]] = {
    "nth": nth,
    "topk": select_topk,
    "sample": draw_sample,
    "scatter": scatter,
    "sort": sort,
    "sort_by": sort_by,
    "scan": scan,
    "running": running,
}


# The n-th element of a sorted vector without sorting it: a radix select, three launches. Each launch counts one digit
# of the elements that share the digits found so far; the last program to finish finds the digit of the element wanted.


DIGIT_TILE = 2048  # elements that one program counts digits of
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
        constants = (counted, descending, bins, shift, sign, mask, DIGIT_TILE)
        start(rank_digit, triton.cdiv(numel, DIGIT_TILE), arguments, constants, 8)
    return found
