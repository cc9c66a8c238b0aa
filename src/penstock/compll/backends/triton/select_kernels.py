"""Exact selection of the k largest magnitudes on the GPU: one read of the vector, and nothing waits for the device.

The same answer as `compll.select`, by the same road: a sample gives a threshold (`guess`), one pass marks what reaches
it (`mark`), the marked are gathered in index order (`gather`), a radix select over them finds the k-th magnitude
(`digit`, three times), and what is above it, with the first of those equal to it, is written (`count`, `write`).

Where the sample misled, `gather` raises a flag in device memory; `digit` then reads the whole vector, and
`mark_exactly` and `write_exactly` do the rest. They are always launched, and leave at once where the flag is down: the
host never asks.

`state`, int32: what the kernels leave for one another.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from penstock.compll.backends.triton.prelude import ROW, bit_count, is_last, load, lowest_bit, positions, store_packed
from penstock.compll.backends.triton.starter import Rehearsal, Starter

THRESHOLD = tl.constexpr(0)  # the guess
REMAINING = tl.constexpr(1)  # rank among those that share the digits found so far; at the end: ties to take
KNOWN = tl.constexpr(2)  # mask of the bits found
PREFIX = tl.constexpr(3)  # those bits; at the end: the k-th largest magnitude
FALLBACK = tl.constexpr(4)
TICKET = tl.constexpr(5)
CANDIDATES = tl.constexpr(6)
COUNTER = 7  # how many were chosen, where the caller gives no memory for it
STATE_INTS = 8

SAMPLE = 1 << 17
GUESS_BINS, GUESS_SHIFT = 4096, 19  # the sample is ranked by 8 bits of exponent and 4 of fraction
DIGITS = ((20, 2048), (10, 1024), (0, 1024))
UNIT = tl.constexpr(32768)  # elements of one program of `mark` and `gather`
TILE = tl.constexpr(2048)


@triton.jit
def magnitude(value):
    """Return a float's bits without the sign."""
    return value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def actual(size_ptr, numel, COUNTED: tl.constexpr):
    """Return the vector's size: known to the host, or counted on the device."""
    size = numel
    if COUNTED:
        size = tl.load(size_ptr)
    return size


@triton.jit
def total_before(counts_ptr, program, count):
    """Return the sum of the counts before a program's own, and of all of them."""
    some = tl.arange(0, 1024)
    below = tl.zeros([1024], tl.int32)
    whole = tl.zeros([1024], tl.int32)
    for first in tl.range(0, count, 1024):
        at = first + some
        counts = tl.load(counts_ptr + at, mask=at < count, other=0)
        below += tl.where(at < program, counts, 0)
        whole += counts
    return tl.sum(below, axis=0), tl.sum(whole, axis=0)


@triton.jit
def resolve(histogram_ptr, rank, BINS: tl.constexpr):
    """Return the bin that holds the rank-th largest and the rank inside it; leaves the histogram zero."""
    bin_ = BINS - 1 - tl.arange(0, BINS)
    count = tl.load(histogram_ptr + bin_, cache_modifier=".cg")
    tl.store(histogram_ptr + bin_, tl.zeros_like(count))
    above = tl.cumsum(count, axis=0)
    hit = (above >= rank) & (above - count < rank)
    return tl.sum(tl.where(hit, bin_, 0), axis=0), tl.sum(tl.where(hit, rank - above + count, 0), axis=0)


@triton.jit(do_not_specialize=["numel", "k"])
def guess(
    x_ptr, size_ptr, histogram_ptr, state_ptr, numel: "i32", k: "i32", chosen_ptr,
    COUNTED: tl.constexpr, SAMPLES: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Rank a strided sample; the threshold should be reached by k elements and not many more."""
    size = actual(size_ptr, numel, COUNTED)
    stride = tl.maximum(size // SAMPLES, 1)
    count = tl.maximum(size // stride, 0)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(x_ptr + at.to(tl.int64) * stride, mask=inside, other=0.0)
    histogram = tl.histogram(magnitude(value) >> SHIFT, BINS, mask=inside)
    tl.atomic_add(histogram_ptr + tl.arange(0, BINS), histogram, mask=histogram != 0, sem="relaxed")
    if is_last(state_ptr + TICKET):
        wanted = tl.minimum(k, size)
        expected = count.to(tl.float32) * wanted.to(tl.float32) / tl.maximum(size, 1).to(tl.float32)
        rank = tl.minimum((expected + 4.0 * tl.sqrt(expected) + 3.0).to(tl.int32), count)
        digit_, _ = resolve(histogram_ptr, rank, BINS)
        tl.store(state_ptr + THRESHOLD, digit_ << SHIFT)
        tl.store(chosen_ptr, wanted)
        tl.store(state_ptr + REMAINING, wanted)
        tl.store(state_ptr + KNOWN, 0)
        tl.store(state_ptr + PREFIX, 0)


@triton.jit(do_not_specialize=["k"])
def begin(size_ptr, state_ptr, chosen_ptr, k: "i32"):
    """Prepare for looking at every element: the vector is counted, and few."""
    wanted = tl.minimum(k, tl.load(size_ptr))
    tl.store(chosen_ptr, wanted)
    tl.store(state_ptr + REMAINING, wanted)
    tl.store(state_ptr + KNOWN, 0)
    tl.store(state_ptr + PREFIX, 0)
    tl.store(state_ptr + FALLBACK, 1)


@triton.jit(do_not_specialize=["numel"])
def mark(x_ptr, size_ptr, mask_ptr, counts_ptr, state_ptr, numel: "i32", COUNTED: tl.constexpr):
    """One bit for each element that reaches the threshold, and how many there are in each unit."""
    size = actual(size_ptr, numel, COUNTED)
    threshold = tl.load(state_ptr + THRESHOLD)
    count = tl.zeros([TILE // ROW], tl.int32)
    first = tl.program_id(0) * (UNIT // TILE)
    last = tl.minimum(first + UNIT // TILE, tl.cdiv(size, UNIT) * (UNIT // TILE))
    for block in tl.range(first, last):
        i = positions(block, TILE)
        full = (block + 1) * TILE <= size
        keep = (magnitude(load(x_ptr, i, size, full)) >= threshold) & (i < size)
        count += tl.sum(keep.to(tl.int32), axis=1)
        store_packed(mask_ptr, keep.to(tl.int32), block, (block + 1) * TILE, True, 1, TILE)
    tl.store(counts_ptr + tl.program_id(0), tl.sum(count, axis=0))


@triton.jit(do_not_specialize=["numel", "k", "limit"])
def gather(
    x_ptr, size_ptr, mask_ptr, counts_ptr, state_ptr, index_ptr, value_ptr, numel: "i32", k: "i32", limit: "i32",
    COUNTED: tl.constexpr,
):  # fmt: skip
    """The marked elements in index order; the flag goes up where they are fewer than k or more than fit."""
    place, total = total_before(counts_ptr, tl.program_id(0), tl.num_programs(0))
    size = actual(size_ptr, numel, COUNTED)
    misled = (total < tl.minimum(k, size)) | (total > limit)
    if tl.program_id(0) == 0:
        tl.store(state_ptr + FALLBACK, misled.to(tl.int32))
        tl.store(state_ptr + CANDIDATES, total)
    if (tl.load(counts_ptr + tl.program_id(0)) > 0) & (misled == 0):
        first = tl.program_id(0) * (UNIT // 32) + tl.arange(0, UNIT // 32)
        word = tl.load(mask_ptr.to(tl.pointer_type(tl.uint32)) + first)
        count = bit_count(word)
        to = place + tl.cumsum(count, axis=0) - count
        left = tl.max(count, axis=0)
        while left > 0:
            on = word != 0
            i = first * 32 + lowest_bit(word)
            tl.store(index_ptr + to, i, mask=on)
            tl.store(value_ptr + to, magnitude(tl.load(x_ptr + i, mask=on, other=0.0)), mask=on)
            to += on.to(tl.int32)
            word = word & (word - 1)
            left -= 1


@triton.jit(do_not_specialize=["numel"])
def digit(
    x_ptr, size_ptr, candidates_ptr, histogram_ptr, state_ptr, numel: "i32",
    COUNTED: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The next digit of the k-th largest magnitude, among the candidates or, the flag up, among all elements."""
    known, prefix = tl.load(state_ptr + KNOWN), tl.load(state_ptr + PREFIX)
    all_of_them = tl.load(state_ptr + FALLBACK) != 0
    size = tl.where(all_of_them, actual(size_ptr, numel, COUNTED), tl.load(state_ptr + CANDIDATES))
    for block in tl.range(tl.program_id(0), tl.cdiv(size, TILE), tl.num_programs(0)):
        at = block * TILE + tl.arange(0, TILE)
        if all_of_them:
            bits = magnitude(tl.load(x_ptr + at, mask=at < size, other=0.0))
        else:
            bits = tl.load(candidates_ptr + at, mask=at < size, other=0)
        shared = (at < size) & ((bits & known) == prefix)
        histogram = tl.histogram((bits >> SHIFT) & (BINS - 1), BINS, mask=shared)
        tl.atomic_add(histogram_ptr + tl.arange(0, BINS), histogram, mask=histogram != 0, sem="relaxed")
    if is_last(state_ptr + TICKET):
        found, rank = resolve(histogram_ptr, tl.load(state_ptr + REMAINING), BINS)
        tl.store(state_ptr + REMAINING, rank)
        tl.store(state_ptr + KNOWN, known | ((BINS - 1) << SHIFT))
        tl.store(state_ptr + PREFIX, prefix | (found << SHIFT))


@triton.jit
def count(candidates_ptr, above_ptr, equal_ptr, state_ptr):
    """How many candidates of each tile are above the k-th magnitude, and how many equal to it."""
    size, threshold = tl.load(state_ptr + CANDIDATES), tl.load(state_ptr + PREFIX)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    bits = tl.load(candidates_ptr + at, mask=at < size, other=-1)
    if tl.load(state_ptr + FALLBACK) == 0:
        tl.store(above_ptr + tl.program_id(0), tl.sum((bits > threshold).to(tl.int32), axis=0))
        tl.store(equal_ptr + tl.program_id(0), tl.sum((bits == threshold).to(tl.int32), axis=0))


@triton.jit
def write(index_ptr, candidates_ptr, above_ptr, equal_ptr, state_ptr, out_ptr):
    """The indices of the chosen candidates, ascending."""
    size, threshold = tl.load(state_ptr + CANDIDATES), tl.load(state_ptr + PREFIX)
    if tl.load(state_ptr + FALLBACK) == 0:
        ties = tl.load(state_ptr + REMAINING)
        above, _ = total_before(above_ptr, tl.program_id(0), tl.num_programs(0))
        equal, _ = total_before(equal_ptr, tl.program_id(0), tl.num_programs(0))
        at = tl.program_id(0) * TILE + tl.arange(0, TILE)
        bits = tl.load(candidates_ptr + at, mask=at < size, other=-1)
        is_tie = (bits == threshold).to(tl.int32)
        rank = equal + tl.cumsum(is_tie, axis=0) - is_tie
        take = (bits > threshold).to(tl.int32) + is_tie * (rank < ties).to(tl.int32)
        to = above + tl.minimum(equal, ties) + tl.cumsum(take, axis=0) - take
        tl.store(out_ptr + to, tl.load(index_ptr + at, mask=at < size, other=0), mask=take != 0)


@triton.jit(do_not_specialize=["numel"])
def mark_exactly(
    x_ptr,
    size_ptr,
    mask_ptr,
    ties_ptr,
    above_ptr,
    equal_ptr,
    state_ptr,
    numel: "i32",
    COUNTED: tl.constexpr,
    EXACT_UNIT: tl.constexpr,
):
    """The flag up: one bit for each element above the k-th magnitude and one for each equal to it, and how many."""
    if tl.load(state_ptr + FALLBACK) != 0:
        size, threshold = actual(size_ptr, numel, COUNTED), tl.load(state_ptr + PREFIX)
        above = tl.zeros([TILE // ROW], tl.int32)
        equal = tl.zeros([TILE // ROW], tl.int32)
        first = tl.program_id(0) * (EXACT_UNIT // TILE)
        last = tl.minimum(first + EXACT_UNIT // TILE, tl.cdiv(size, EXACT_UNIT) * (EXACT_UNIT // TILE))
        for block in tl.range(first, last):
            i = positions(block, TILE)
            bits = tl.where(i < size, magnitude(load(x_ptr, i, size, (block + 1) * TILE <= size)), -1)
            above += tl.sum((bits > threshold).to(tl.int32), axis=1)
            equal += tl.sum((bits == threshold).to(tl.int32), axis=1)
            store_packed(mask_ptr, (bits > threshold).to(tl.int32), block, (block + 1) * TILE, True, 1, TILE)
            store_packed(ties_ptr, (bits == threshold).to(tl.int32), block, (block + 1) * TILE, True, 1, TILE)
        tl.store(above_ptr + tl.program_id(0), tl.sum(above, axis=0))
        tl.store(equal_ptr + tl.program_id(0), tl.sum(equal, axis=0))


@triton.jit
def write_exactly(mask_ptr, ties_ptr, above_ptr, equal_ptr, state_ptr, out_ptr, EXACT_UNIT: tl.constexpr):
    """The flag up: the indices of the chosen elements, ascending."""
    mine = tl.load(above_ptr + tl.program_id(0)) + tl.load(equal_ptr + tl.program_id(0))
    if (tl.load(state_ptr + FALLBACK) != 0) & (mine > 0):
        ties = tl.load(state_ptr + REMAINING)
        above, _ = total_before(above_ptr, tl.program_id(0), tl.num_programs(0))
        equal, _ = total_before(equal_ptr, tl.program_id(0), tl.num_programs(0))
        first = tl.program_id(0) * (EXACT_UNIT // 32) + tl.arange(0, EXACT_UNIT // 32)
        mask = tl.load(mask_ptr.to(tl.pointer_type(tl.uint32)) + first)
        tie = tl.load(ties_ptr.to(tl.pointer_type(tl.uint32)) + first)
        tie_count = bit_count(tie)
        rank = equal + tl.cumsum(tie_count, axis=0) - tie_count
        mask_count = bit_count(mask)
        to = above + tl.cumsum(mask_count, axis=0) - mask_count + tl.minimum(rank, ties)
        word = mask | tie
        left = tl.max(bit_count(word), axis=0)
        while left > 0:
            low = word & (0 - word)
            is_tie = (tie & low) != 0
            take = (word != 0) & ((is_tie == 0) | (rank < ties))
            tl.store(out_ptr + to, first * 32 + lowest_bit(word), mask=take)
            to += take.to(tl.int32)
            rank += is_tie.to(tl.int32)
            word = word & (word - 1)
            left -= 1


def largest_magnitudes(values: Any, k: int, size: Any, scratch: Any, start: Any = None, chosen_size: Any = None) -> Any:
    """Return the ascending indices of the k largest |values|, int32, on the device and without waiting for it.

    `size` is a one-element int32 tensor with how many of `values` count, or None for all of them; fewer than k leave
    the rest of the result untouched. `scratch` holds zeros before and after: 4096 + STATE_INTS int32. `start` launches
    a kernel; the driver has a quicker way than Triton's own. `chosen_size` is where the number of them is written.
    """
    start = start or Starter().start
    numel, device = values.numel(), values.device
    if not k or not numel:
        if chosen_size is not None:
            chosen_size.zero_()
        return torch.empty(k, dtype=torch.int32, device=device)
    units, limit = triton.cdiv(numel, UNIT.value), min(numel, 4 * k + 4096)
    exact_unit = 4096 if size is not None else UNIT.value  # few and close together: spread them over more programs
    exact_units = triton.cdiv(numel, exact_unit)
    tiles = triton.cdiv(limit, TILE.value)
    mask_ints = units * UNIT.value // 32
    sizes = [k, limit, limit, exact_units, exact_units, tiles, tiles, mask_ints, mask_ints]
    aligned = [-(-ints // 4) * 4 for ints in sizes]
    work = torch.empty(sum(aligned), dtype=torch.int32, device=device).split(aligned)
    chosen, index, candidates, above, equal, tile_above, tile_equal, mask, ties = work
    histogram, state = scratch[:GUESS_BINS], scratch[GUESS_BINS:]
    counted, sized = size is not None, scratch if size is None else size
    bytes_, tie_bytes = mask.view(torch.uint8), ties.view(torch.uint8)
    programs = min(triton.cdiv(numel, TILE.value), 132)
    counter = state[COUNTER:] if chosen_size is None else chosen_size
    if counted:
        start(begin, 1, (size, state, counter, k), (), 1)
    else:
        sampling = (counted, SAMPLE, 1024, GUESS_BINS, GUESS_SHIFT)
        samples = triton.cdiv(min(numel, 2 * SAMPLE), 1024)
        start(guess, samples, (values, sized, histogram, state, numel, k, counter), sampling, 8)
        start(mark, units, (values, sized, bytes_, above, state, numel), (counted,), 4)
        start(gather, units, (values, sized, bytes_, above, state, index, candidates, numel, k, limit), (counted,), 4)
    for shift, bins in DIGITS:
        start(digit, programs, (values, sized, candidates, histogram, state, numel), (counted, bins, shift), 8)
    if not counted:
        start(count, tiles, (candidates, tile_above, tile_equal, state), (), 4)
        start(write, tiles, (index, candidates, tile_above, tile_equal, state, chosen), (), 4)
    exact = (values, sized, bytes_, tie_bytes, above, equal, state, numel)
    start(mark_exactly, exact_units, exact, (counted, exact_unit), 4)
    start(write_exactly, exact_units, (bytes_, tie_bytes, above, equal, state, chosen), (exact_unit,), 4)
    return chosen[:k]


def select_on_current_stream(values: Any, k: int) -> Any:
    """Return a function that selects among `values` again each time it is called."""
    scratch = torch.zeros(GUESS_BINS + STATE_INTS, dtype=torch.int32, device=values.device)
    starter = Starter()
    return lambda: largest_magnitudes(values, k, None, scratch, starter.start)


SMALL_NUMEL = tl.constexpr(4096)  # most elements of a vector that one program selects from by itself
SMALL_COUNT = 16  # most of them: they are found one after the other


@triton.jit
def select_each(values_ptr, starts_ptr, sizes_ptr, counts_ptr, places_ptr, out_ptr):
    """One small vector for each program: the largest of it, then the next, the first among equals; in index order."""
    start = tl.load(starts_ptr + tl.program_id(0))
    size, left = tl.load(sizes_ptr + tl.program_id(0)), tl.load(counts_ptr + tl.program_id(0))
    at = tl.arange(0, SMALL_NUMEL)
    bits = tl.where(at < size, magnitude(tl.load(values_ptr + start + at, mask=at < size, other=0.0)), -1)
    taken = tl.zeros([SMALL_NUMEL], tl.int32)
    while left > 0:
        largest = tl.max(bits, axis=0)
        first = tl.min(tl.where(bits == largest, at, SMALL_NUMEL), axis=0)
        taken = tl.where(at == first, 1, taken)
        bits = tl.where(at == first, -1, bits)
        left -= 1
    to = tl.load(places_ptr + tl.program_id(0)) + tl.cumsum(taken, axis=0) - taken
    tl.store(out_ptr + to, (start + at).to(tl.int64), mask=taken != 0)


class Selector:
    """Selects on one device, on the current stream; memory to work in is kept for each stream."""

    def __init__(self, device: Any, starter: Starter | Rehearsal | None = None) -> None:
        self._device, self._starter = device, starter or Starter()
        self._scratch: dict[int, Any] = {}

    def __call__(self, values: Any, k: int) -> Any:
        """Return the ascending indices of the k largest |values|, int32."""
        stream = torch.cuda.current_stream(self._device).cuda_stream if values.is_cuda else 0
        if stream not in self._scratch:
            self._scratch[stream] = torch.zeros(GUESS_BINS + STATE_INTS, dtype=torch.int32, device=self._device)
        return largest_magnitudes(values, k, None, self._scratch[stream], self._starter.start)

    def is_small(self, numel: int, k: int) -> bool:
        """Say whether `each` takes a vector."""
        return numel <= SMALL_NUMEL.value and k <= SMALL_COUNT

    def each(self, values: Any, table: Any, out: Any) -> None:
        """Select from many small vectors at once; `table` has rows of where they start in `values`, their sizes, how
        many to select, and where in `out`, int64, to write their indices in `values`; all int32."""
        if table.shape[1]:
            self._starter.start(select_each, table.shape[1], (values, *table.unbind(0), out), (), 4)
