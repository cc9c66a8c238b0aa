"""Selects the largest of every segment of many rows, exactly, and sums segments up.

A row is one worker's gradient; a segment is a tensor of it, or all of it. Among equal magnitudes the lower index is
larger: every value has one key, its magnitude's 31 bits above 22 bits of reversed index, and the k-th largest key is
found digit by digit, 8 bits at a time, from counts (radix select). Rows that are decided early skip later digits.

Counting everything at every digit is slow, and from step to step thresholds change little. So candidates are gathered
first: what is nearly as large as the last threshold. If they are too few or too many, everything is counted after all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 4096  # values of one program
_INDEX_BITS = 22
_NEARLY = 0.8  # of the last threshold: normal values then have about eight times as many candidates as are taken
_ROOM = 24  # candidates for each that is taken: thresholds may rise by a sixth, too
_DIGITS = ((45, 8), (37, 8), (29, 8), (22, 7), (14, 8), (6, 8), (0, 6))  # (lowest bit, bits), from the top


@triton.jit
def _keys(values, index):
    """Return what orders values by magnitude, then by place."""
    magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return (magnitude.to(tl.int64) << 22) | (4194303 - index).to(tl.int64)


@triton.jit
def _count(values, owner, begin, end, found, needed, counts, elements, segments, shift, bits, BLOCK: tl.constexpr):
    """Count a digit's values among keys that agree with what is found so far."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    segment = row * segments + tl.load(owner + block)
    if tl.load(needed + segment) > 0:
        index = tl.load(begin + block) + tl.arange(0, BLOCK)
        inside = index < tl.load(end + block)
        key = _keys(tl.load(values + row * elements + index, mask=inside, other=0.0), index)
        agrees = inside & ((key >> (shift + bits)) == (tl.load(found + segment) >> (shift + bits)))
        digit = tl.where(agrees, (key >> shift) & ((1 << bits) - 1), 256).to(tl.int32)
        number = tl.arange(0, 512)
        count = tl.histogram(digit, 512)
        tl.atomic_add(counts + segment * 256 + number, count, mask=(number < 256) & (count > 0))


@triton.jit
def _choose(found, needed, counts, shift):
    """Fix one digit of the k-th largest key: the largest with enough keys at or above it."""
    segment = tl.program_id(0).to(tl.int64)
    need = tl.load(needed + segment)
    if need > 0:
        number = tl.arange(0, 256)
        count = tl.load(counts + segment * 256 + number)
        above = tl.sum(count) - tl.cumsum(count, 0)
        digit = tl.max(tl.where(above + count >= need, number, 0))
        chosen = number == digit
        left = need - tl.sum(tl.where(chosen, above, 0))
        tl.store(found + segment, tl.load(found + segment) | (digit.to(tl.int64) << shift))
        tl.store(needed + segment, tl.where(tl.sum(tl.where(chosen, count, 0)) == left, 0, left))
        tl.store(counts + segment * 256 + number, tl.zeros((256,), tl.int32))


@triton.jit
def _gather(values, keys, bound, number, owner, begin, end, first, room, elements, segments, width,
            BLOCK: tl.constexpr):  # fmt: skip
    """Collect the keys of values at or above their segment's bound, in any order, and count them."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    own = tl.load(owner + block)
    index = tl.load(begin + block) + tl.arange(0, BLOCK)
    inside = index < tl.load(end + block)
    key = _keys(tl.load(values + row * elements + index, mask=inside, other=0.0), index)
    large = (inside & ((key >> 22) >= tl.load(bound + row * segments + own))).to(tl.int32)
    count = tl.sum(large)
    if count > 0:
        place = tl.atomic_add(number + row * segments + own, count) + tl.cumsum(large, 0) - 1
        fits = (large > 0) & (place < tl.load(room + own))
        tl.store(keys + row * width + tl.load(first + own) + place, key, mask=fits)


@triton.jit
def _count_gathered(keys, number, owner, begin, first, found, needed, counts, segments, width, shift, bits,
                    BLOCK: tl.constexpr):  # fmt: skip
    """Count a digit's values among gathered keys."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    own = tl.load(owner + block)
    segment = row * segments + own
    start, stop = tl.load(begin + block), tl.load(first + own) + tl.load(number + segment)
    if (tl.load(needed + segment) > 0) & (start < stop):
        index = start + tl.arange(0, BLOCK)
        key = tl.load(keys + row * width + index, mask=index < stop, other=0)
        agrees = (index < stop) & ((key >> (shift + bits)) == (tl.load(found + segment) >> (shift + bits)))
        digit = tl.where(agrees, (key >> shift) & ((1 << bits) - 1), 256).to(tl.int32)
        value = tl.arange(0, 512)
        count = tl.histogram(digit, 512)
        tl.atomic_add(counts + segment * 256 + value, count, mask=(value < 256) & (count > 0))


@triton.jit
def _take(values, taken, owner, begin, end, found, elements, segments, BLOCK: tl.constexpr):
    """Move the selected values to `taken`, which has zeros elsewhere."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    index = tl.load(begin + block) + tl.arange(0, BLOCK)
    inside = index < tl.load(end + block)
    value = tl.load(values + row * elements + index, mask=inside, other=0.0)
    large = _keys(value, index) >= tl.load(found + row * segments + tl.load(owner + block))
    tl.store(taken + row * elements + index, tl.where(large, value, 0.0), mask=inside)
    tl.store(values + row * elements + index, tl.zeros_like(value), mask=inside & large)


@triton.jit
def _summarise(values, partial, begin, end, elements, BLOCK: tl.constexpr):
    """Leave a block's sum of positive values, sum of negative ones, number not negative, minimum and maximum."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    index = tl.load(begin + block) + tl.arange(0, BLOCK)
    inside = index < tl.load(end + block)
    value = tl.load(values + row * elements + index, mask=inside, other=0.0)
    out = partial + (row * tl.num_programs(0) + block) * 5
    tl.store(out, tl.sum(tl.maximum(value, 0.0)))
    tl.store(out + 1, tl.sum(tl.minimum(value, 0.0)))
    tl.store(out + 2, tl.sum((inside & (value >= 0)).to(tl.float32)))
    tl.store(out + 3, tl.min(tl.where(inside, value, float("inf"))))
    tl.store(out + 4, tl.max(tl.where(inside, value, float("-inf"))))


@triton.jit
def _combine(partial, found, first, blocks, BLOCKS: tl.constexpr):
    """Put the blocks of a segment together."""
    row, segment, segments = tl.program_id(1), tl.program_id(0), tl.num_programs(0)
    high, low, number = (
        tl.zeros((BLOCKS,), tl.float32),
        tl.zeros((BLOCKS,), tl.float32),
        tl.zeros((BLOCKS,), tl.float32),
    )
    least = tl.full((BLOCKS,), float("inf"), tl.float32)
    most = tl.full((BLOCKS,), float("-inf"), tl.float32)
    last = tl.load(first + segment + 1)
    for begin in range(tl.load(first + segment), last, BLOCKS):
        block = begin + tl.arange(0, BLOCKS)
        here = partial + (row * blocks + block) * 5
        high += tl.load(here, mask=block < last, other=0.0)
        low += tl.load(here + 1, mask=block < last, other=0.0)
        number += tl.load(here + 2, mask=block < last, other=0.0)
        least = tl.minimum(least, tl.load(here + 3, mask=block < last, other=float("inf")))
        most = tl.maximum(most, tl.load(here + 4, mask=block < last, other=float("-inf")))
    step = tl.num_programs(1) * segments
    out = found + row * segments + segment
    tl.store(out, tl.sum(high))
    tl.store(out + step, tl.sum(low))
    tl.store(out + 2 * step, tl.sum(number))
    tl.store(out + 3 * step, tl.min(least))
    tl.store(out + 4 * step, tl.max(most))


def _integers(values: Sequence[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class Segments:
    """Where segments lie in a row, and which blocks of a row a program each handles."""

    sizes: tuple[int, ...]
    owner: torch.Tensor  # of each block: its segment
    begin: torch.Tensor  # of each block: its first element
    end: torch.Tensor  # of each block: where its segment ends
    first: torch.Tensor  # of each segment: its first block; and one more, the number of blocks
    start: torch.Tensor  # of each segment: its first element
    index: torch.Tensor  # of each element: its segment
    numel: torch.Tensor  # the sizes, on the device

    @classmethod
    def of(cls, sizes: Sequence[int], device: str = "cpu") -> "Segments":
        """Return segments of these sizes, one after the other."""
        assert sum(sizes) <= 1 << _INDEX_BITS, "an index has to fit into a key"
        owner: list[int] = []
        begin: list[int] = []
        end: list[int] = []
        first, start = [0], 0
        for number, size in enumerate(sizes):
            blocks = range(start, start + size, BLOCK)
            owner += [number] * len(blocks)
            begin += blocks
            end += [start + size] * len(blocks)
            start += size
            first.append(len(owner))
        numel = torch.tensor(sizes)
        index = torch.repeat_interleave(torch.arange(len(sizes)), numel).to(device)
        starts = (numel.cumsum(0) - numel).int().to(device)
        owners, begins, ends, firsts = (_integers(each, device) for each in (owner, begin, end, first))
        return cls(tuple(sizes), owners, begins, ends, firsts, starts, index, numel.to(device))

    def taker(self, k: Sequence[int]) -> "Take":
        """Return what takes the k largest of every segment out of rows."""
        room = [min(size, _ROOM * number + 64) for size, number in zip(self.sizes, k, strict=True)]
        device = str(self.owner.device)
        return Take(self, _integers(k, device), Segments.of(room, device), {})

    def summary(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return sums of positive and of negative values, numbers not negative, minima, maxima: [rows, segments]."""
        rows, elements, blocks = values.numel() // values.shape[-1], values.shape[-1], len(self.owner)
        partial = torch.empty((rows, blocks, 5), device=values.device)
        _summarise[(blocks, rows)](values.contiguous(), partial, self.begin, self.end, elements, BLOCK=BLOCK)
        found = torch.empty((5, rows, len(self.sizes)), device=values.device)
        _combine[(len(self.sizes), rows)](partial, found, self.first, blocks, BLOCKS=128)
        return tuple(found.unflatten(1, values.shape[:-1]))


@dataclass(frozen=True, slots=True)
class Take:
    """Takes the largest out of rows; rows are all dimensions but the last."""

    segments: Segments
    k: torch.Tensor  # of each segment: how many are taken
    room: Segments  # of each segment: how many candidates may be gathered
    bounds: dict[torch.Size, torch.Tensor]  # by shape of the rows: magnitudes, as integers, that make a candidate

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest, zeros elsewhere; `values` keep the others, and zeros in their place."""
        assert values.is_contiguous()
        rows, elements, segments = values.numel() // values.shape[-1], values.shape[-1], len(self.k)
        if values.shape not in self.bounds:
            self.bounds[values.shape] = self.k.new_zeros(rows * segments)
        bound = self.bounds[values.shape]
        k, table = self.k.repeat(rows), (self.segments.owner, self.segments.begin, self.segments.end)
        found, number = torch.zeros_like(k, dtype=torch.int64), torch.zeros_like(k)
        counts = self.k.new_zeros((rows * segments, 256))
        grid, rest = (len(self.segments.owner), rows), (elements, segments)
        if sum(self.room.sizes) * 2 < elements:
            keys = torch.empty((rows, sum(self.room.sizes)), dtype=torch.int64, device=values.device)
            room = self.room.numel.int()
            _gather[grid](values, keys, bound, number, *table, self.room.start, room, *rest, keys.shape[1], BLOCK=BLOCK)
            fitting = torch.where((number >= k) & (number <= room.repeat(rows)), k, 0)
            self._search_gathered(keys, number, found, fitting.clone(), counts)
            # Digits may be left open that tell candidates from each other; no value below the bound is one.
            found = torch.where(fitting > 0, torch.maximum(found, bound.long() << _INDEX_BITS), found)
            k = k - fitting
        for shift, bits in _DIGITS:
            _count[grid](values, *table, found, k, counts, *rest, shift, bits, BLOCK=BLOCK)
            _choose[(rows * segments,)](found, k, counts, shift)
        taken = torch.empty_like(values)
        _take[grid](values, taken, *table, found, *rest, BLOCK=BLOCK)
        bound.copy_(((found >> _INDEX_BITS).int().view(torch.float32) * _NEARLY).view(torch.int32).clamp(min=1))
        return taken

    def _search_gathered(
        self, keys: torch.Tensor, number: torch.Tensor, found: torch.Tensor, needed: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Find the k-th largest key of every segment whose candidates will do; `needed` is 0 for all others."""
        room, segments = self.room, len(self.k)
        for shift, bits in _DIGITS:
            _count_gathered[(len(room.owner), len(keys))](
                keys, number, room.owner, room.begin, room.start, found, needed, counts, segments, keys.shape[1],
                shift, bits, BLOCK=BLOCK,
            )  # fmt: skip
            _choose[(len(found),)](found, needed, counts, shift)
