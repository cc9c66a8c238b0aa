"""Sparse blocks on the device: written, merged and put in place there, all pieces of a message in one launch.

    header    16 bytes; its first int32 is 1 in a block of what was not finite, whose entries mean nothing
    values    k float32, or k bfloat16 (the upper halves of float32), padded to 4 bytes
    indices   k int32 within the piece, ascending; none where all elements are sent

k follows from the piece, so all sizes are known beforehand and no header needs to be read by the host. What a block
holds, and every bit of a merge, is what `codecs/sparse` has on the host: `unite` and `cut` of `entry_kernels.py`.

In a merge each entry looks for its index in the other block (`unite`, a binary search); how many entries lie below it
there is how far it moves. Two blocks of k entries fill 2 k slots, in which the second of a pair is marked as empty:

    one    2:5  7:1         slots   2:5  4:2  7:1+3  -
    other  4:2  7:3

Then the k-th largest magnitude of each piece is found digit by digit, as `select_kernels` does (`digit`, three times),
and what is above it, with the first of those equal to it, is the new block (`count`, `cut`). The rest goes to the
residual. Every program has a tile of one piece, so that large pieces are shared by many; `state` is what they leave for
one another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from penstock.compll.backends.triton.prelude import fill_nan, is_finite, is_last_of, look_at_firsts
from penstock.compll.backends.triton.select_kernels import magnitude, resolve, total_before
from penstock.compll.backends.triton.starter import Rehearsal, Starter

HEADER = tl.constexpr(16)  # bytes
COLUMNS = tl.constexpr(4)  # of a row for each piece: first element, elements, entries, entries of the pieces before
TILE = tl.constexpr(1024)  # entries of one program
SLOTS = tl.constexpr(2048)  # of one program: those of as many entries of two blocks
EMPTY = tl.constexpr(-1)  # index of the second of a pair
REFUSED = tl.constexpr(0)  # `state` of a piece: 1 where the first block is of what was not finite, 2 for the second
REMAINING = tl.constexpr(1)  # rank among those that share the digits found so far; at the end: ties to take
PREFIX = tl.constexpr(2)  # those digits; at the end: the k-th largest magnitude
TICKET = tl.constexpr(3)
STATE = tl.constexpr(4)  # int32 of each piece
HISTOGRAM = tl.constexpr(2048)  # int32 of each piece
DIGITS = ((2048, 20, 0), (1024, 10, 0x7FF00000), (1024, 0, 0x7FFFFC00))  # bins, shift, and bits known before
_LOOKS = 1024  # pieces at a time


@triton.jit
def values_nbytes(count, BITS: tl.constexpr):
    """Return the bytes before the indices."""
    return tl.cdiv(count * (BITS // 8), 4) * 4


@triton.jit
def is_refused(payload_ptr, place):
    """Say whether a block is of what was not finite."""
    return tl.load((payload_ptr + place).to(tl.pointer_type(tl.int32))) != 0


@triton.jit
def load_value(payload_ptr, place, i, inside, BITS: tl.constexpr):
    """Return values of a block as float32."""
    if BITS == 32:
        value = tl.load((payload_ptr + place + HEADER).to(tl.pointer_type(tl.float32)) + i, mask=inside, other=0.0)
    else:
        half = tl.load((payload_ptr + place + HEADER).to(tl.pointer_type(tl.uint16)) + i, mask=inside, other=0)
        value = (half.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return value


@triton.jit
def rounded(value, BITS: tl.constexpr):
    """Return what a receiver reads for a value: bfloat16 is rounded to nearest, ties to even."""
    if BITS == 16:
        bits = value.to(tl.uint32, bitcast=True)
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        value = tl.where(value == value, upper, 0x7FC00000).to(tl.uint32).to(tl.float32, bitcast=True)
    return value


@triton.jit
def store_value(payload_ptr, place, i, value, inside, BITS: tl.constexpr):
    """Write values, which are `rounded`, to a block."""
    if BITS == 32:
        tl.store((payload_ptr + place + HEADER).to(tl.pointer_type(tl.float32)) + i, value, mask=inside)
    else:
        half = (value.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)
        tl.store((payload_ptr + place + HEADER).to(tl.pointer_type(tl.uint16)) + i, half, mask=inside)


@triton.jit
def load_index(payload_ptr, place, i, inside, count, numel, BITS: tl.constexpr):
    """Return indices of a block: where all elements are sent, entry i is element i."""
    index = i
    if count < numel:
        stored = (payload_ptr + place + HEADER + values_nbytes(count, BITS)).to(tl.pointer_type(tl.int32))
        index = tl.load(stored + i, mask=inside, other=0)
    return index


@triton.jit
def store_index(payload_ptr, place, i, index, inside, count, numel, BITS: tl.constexpr):
    """Write indices to a block, unless all elements are sent."""
    if count < numel:
        stored = (payload_ptr + place + HEADER + values_nbytes(count, BITS)).to(tl.pointer_type(tl.int32))
        tl.store(stored + i, index, mask=inside)


@triton.jit
def add_at(values_ptr, index, added, where):
    """Add to elements that no other thread adds to."""
    tl.store(values_ptr + index, tl.load(values_ptr + index, mask=where, other=0.0) + added, mask=where)


@triton.jit
def pack(table_ptr, work_ptr, payload_ptr, places_ptr, index_ptr, value_ptr, state_ptr, BITS: tl.constexpr):
    """Write the block of each piece from chosen entries: indices in the bucket, int64, and values, not yet rounded."""
    piece, tile = tl.load(work_ptr + tl.program_id(0) * 2), tl.load(work_ptr + tl.program_id(0) * 2 + 1)
    row = table_ptr + piece * COLUMNS
    start, numel = tl.load(row), tl.load(row + 1).to(tl.int32)
    count, entry = tl.load(row + 2).to(tl.int32), tl.load(row + 3)
    place, state = tl.load(places_ptr + piece), state_ptr + piece * STATE
    i = tile * TILE + tl.arange(0, TILE)
    inside = i < count
    value = tl.load(value_ptr + entry + i, mask=inside, other=0.0)
    index = (tl.load(index_ptr + entry + i, mask=inside, other=0) - start).to(tl.int32)
    store_value(payload_ptr, place, i, rounded(value, BITS), inside, BITS)
    store_index(payload_ptr, place, i, index, inside, count, numel, BITS)
    if tl.max((is_finite(value) == 0).to(tl.int32), axis=0) != 0:
        tl.store(state + REFUSED, 1)
    if is_last_of(state + TICKET, tl.cdiv(count, TILE)):
        refused = tl.load(state + REFUSED, cache_modifier=".cg")
        tl.store((payload_ptr + place).to(tl.pointer_type(tl.int32)), refused)


@triton.jit
def found_in(payload_ptr, place, index, inside, count, numel, BITS: tl.constexpr):
    """Return how many entries of a block have a lower index, and whether the one behind them has the same."""
    low = tl.zeros([TILE], tl.int32)
    high = tl.zeros([TILE], tl.int32) + count
    left = count
    while left > 0:  # as often as `count` has digits
        middle = (low + high) // 2
        among = inside & (low < high)
        below = among & (load_index(payload_ptr, place, middle, among, count, numel, BITS) < index)
        high = tl.where(among & (below == 0), middle, high)
        low = tl.where(below, middle + 1, low)
        left = left // 2
    among = inside & (low < count)
    return low, among & (load_index(payload_ptr, place, low, among, count, numel, BITS) == index)


@triton.jit
def unite(table_ptr, work_ptr, payload_ptr, one_ptr, other_ptr, sum_ptr, index_ptr, state_ptr, BITS: tl.constexpr):
    """Write the sum of two blocks of each piece to slots, in the order of indices; a value without another adds 0."""
    piece, tile = tl.load(work_ptr + tl.program_id(0) * 2), tl.load(work_ptr + tl.program_id(0) * 2 + 1)
    row = table_ptr + piece * COLUMNS
    numel, count = tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32)
    slot = tl.load(row + 3) * 2
    one, other = tl.load(one_ptr + piece), tl.load(other_ptr + piece)
    if tile == 0:
        refused = is_refused(payload_ptr, one).to(tl.int32) + is_refused(payload_ptr, other).to(tl.int32) * 2
        tl.store(state_ptr + piece * STATE + REFUSED, refused)
    i = tile * TILE + tl.arange(0, TILE)
    inside = i < count

    index = load_index(payload_ptr, one, i, inside, count, numel, BITS)
    below, both = found_in(payload_ptr, other, index, inside, count, numel, BITS)
    value = load_value(payload_ptr, one, i, inside, BITS) + load_value(payload_ptr, other, below, both, BITS)
    tl.store(sum_ptr + slot + i + below, value, mask=inside)
    tl.store(index_ptr + slot + i + below, index, mask=inside)

    index = load_index(payload_ptr, other, i, inside, count, numel, BITS)
    below, both = found_in(payload_ptr, one, index, inside, count, numel, BITS)
    behind = below + both.to(tl.int32)
    value = load_value(payload_ptr, other, i, inside, BITS) + tl.zeros([TILE], tl.float32)
    tl.store(sum_ptr + slot + i + behind, value, mask=inside)
    tl.store(index_ptr + slot + i + behind, tl.where(both, EMPTY, index), mask=inside)


@triton.jit
def slot_bits(sum_ptr, index_ptr, row, tile):
    """Return the magnitudes of a tile, -1 for empty slots and beyond the end; with the values and their indices."""
    first, i = tl.load(row + 3) * 2, tile * SLOTS + tl.arange(0, SLOTS)
    inside = i < tl.load(row + 2).to(tl.int32) * 2
    value = tl.load(sum_ptr + first + i, mask=inside, other=0.0)
    index = tl.load(index_ptr + first + i, mask=inside, other=EMPTY)
    return tl.where(index == EMPTY, -1, magnitude(value)), value, index


@triton.jit
def digit(
    table_ptr, work_ptr, sum_ptr, index_ptr, state_ptr, histogram_ptr,
    BINS: tl.constexpr, SHIFT: tl.constexpr, KNOWN: tl.constexpr,
):  # fmt: skip
    """The next digit of each piece's k-th largest magnitude."""
    piece, tile = tl.load(work_ptr + tl.program_id(0) * 2), tl.load(work_ptr + tl.program_id(0) * 2 + 1)
    row, state, bins = table_ptr + piece * COLUMNS, state_ptr + piece * STATE, histogram_ptr + piece * HISTOGRAM
    count, prefix = tl.load(row + 2).to(tl.int32), tl.load(state + PREFIX)
    bits, _, _ = slot_bits(sum_ptr, index_ptr, row, tile)
    shared = (bits >= 0) & ((bits & KNOWN) == prefix)
    histogram = tl.histogram((bits >> SHIFT) & (BINS - 1), BINS, mask=shared)
    tl.atomic_add(bins + tl.arange(0, BINS), histogram, mask=histogram != 0, sem="relaxed")
    if is_last_of(state + TICKET, tl.cdiv(count, TILE)):
        remaining = count
        if KNOWN != 0:
            remaining = tl.load(state + REMAINING)
        found, rank = resolve(bins, remaining, BINS)
        tl.store(state + REMAINING, rank)
        tl.store(state + PREFIX, prefix | (found << SHIFT))


@triton.jit
def count(table_ptr, work_ptr, sum_ptr, index_ptr, state_ptr, above_ptr, equal_ptr):
    """How many slots of each tile are above the k-th magnitude of their piece, and how many equal to it."""
    piece, tile = tl.load(work_ptr + tl.program_id(0) * 2), tl.load(work_ptr + tl.program_id(0) * 2 + 1)
    threshold = tl.load(state_ptr + piece * STATE + PREFIX)
    bits, _, _ = slot_bits(sum_ptr, index_ptr, table_ptr + piece * COLUMNS, tile)
    tl.store(above_ptr + tl.program_id(0), tl.sum((bits > threshold).to(tl.int32), axis=0))
    tl.store(equal_ptr + tl.program_id(0), tl.sum((bits == threshold).to(tl.int32), axis=0))


@triton.jit
def give_back(payload_ptr, place, residual_ptr, tile, count, numel, BITS: tl.constexpr):
    """Add a tile of a block's entries to the residual."""
    i = tile * TILE + tl.arange(0, TILE)
    inside = i < count
    index = load_index(payload_ptr, place, i, inside, count, numel, BITS)
    add_at(residual_ptr, index, load_value(payload_ptr, place, i, inside, BITS), inside)


@triton.jit
def cut(
    table_ptr, work_ptr, payload_ptr, one_ptr, other_ptr, sum_ptr, index_ptr, state_ptr, above_ptr, equal_ptr,
    residual_ptr, KEEPS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Write the k largest entries of each sum over the first of its two blocks, and add the rest to the residual.

    Of two blocks one of which is of what was not finite, the other's entries are owed again.
    """
    piece, tile = tl.load(work_ptr + tl.program_id(0) * 2), tl.load(work_ptr + tl.program_id(0) * 2 + 1)
    row, state = table_ptr + piece * COLUMNS, state_ptr + piece * STATE
    owed, numel, count = residual_ptr + tl.load(row), tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32)
    one, other = tl.load(one_ptr + piece), tl.load(other_ptr + piece)
    refused = tl.load(state + REFUSED)
    if refused != 0:
        if KEEPS:
            if refused == 1:
                give_back(payload_ptr, other, owed, tile, count, numel, BITS)
            if refused == 2:
                give_back(payload_ptr, one, owed, tile, count, numel, BITS)
        tl.store((payload_ptr + one).to(tl.pointer_type(tl.int32)), 1)
    else:
        threshold, ties, tiles = tl.load(state + PREFIX), tl.load(state + REMAINING), tl.cdiv(count, TILE)
        first = tl.program_id(0) - tile  # of the piece
        above, _ = total_before(above_ptr + first, tile, tiles)
        equal, _ = total_before(equal_ptr + first, tile, tiles)
        bits, value, index = slot_bits(sum_ptr, index_ptr, row, tile)
        tie = (bits == threshold).to(tl.int32)
        rank = equal + tl.cumsum(tie, axis=0) - tie
        take = (bits > threshold).to(tl.int32) + tie * (rank < ties).to(tl.int32)
        to = above + tl.minimum(equal, ties) + tl.cumsum(take, axis=0) - take
        sent = rounded(value, BITS)
        store_value(payload_ptr, one, to, sent, take != 0, BITS)
        store_index(payload_ptr, one, to, index, take != 0, count, numel, BITS)
        if KEEPS:
            if BITS == 32:
                add_at(owed, index, value, (bits >= 0) & (take == 0))
            else:
                add_at(owed, index, tl.where(take != 0, value - sent, value), bits >= 0)


@triton.jit
def put(table_ptr, work_ptr, payload_ptr, places_ptr, bucket_ptr, ADD: tl.constexpr, BITS: tl.constexpr):
    """Put the entries of each block where they belong, or add them there; all of a piece is NaN that was not finite."""
    piece, tile = tl.load(work_ptr + tl.program_id(0) * 2), tl.load(work_ptr + tl.program_id(0) * 2 + 1)
    row = table_ptr + piece * COLUMNS
    start, numel, count = tl.load(row), tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32)
    place = tl.load(places_ptr + piece)
    if is_refused(payload_ptr, place):
        fill_nan(tile, tl.cdiv(count, TILE), bucket_ptr + start, numel, TILE)
    else:
        i = tile * TILE + tl.arange(0, TILE)
        inside = i < count
        index = load_index(payload_ptr, place, i, inside, count, numel, BITS)
        value = load_value(payload_ptr, place, i, inside, BITS)
        if ADD:
            add_at(bucket_ptr + start, index, value, inside)
        else:
            tl.store(bucket_ptr + start + index, value, mask=inside)


@dataclass(frozen=True, slots=True)
class Table:
    """Pieces of a bucket that are written, merged or read together, on the device."""

    rows: torch.Tensor  # int64, COLUMNS for each piece
    work: torch.Tensor  # int32: the piece of each program of a grid over tiles, and its tile there
    entries: int  # of all pieces


class SparseBlocks:
    """The kernels on one device, for blocks with values of so many bits."""

    def __init__(self, device: torch.device, value_bits: int, starter: Starter | Rehearsal | None = None) -> None:
        self._device, self._bits, self._starter = device, value_bits, starter or Starter()

    def nbytes(self, numel: int, count: int) -> int:
        """Return the bytes of a block of `count` entries from `numel` elements."""
        indices = 0 if count == numel else 4 * count
        return int(HEADER.value) + -(-count * self._bits // 32) * 4 + indices

    def table(self, pieces: Sequence[tuple[int, int]], counts: Sequence[int]) -> Table:
        """Return what kernels need to know of pieces with so many entries each."""
        rows, tiles, before = list[tuple[int, ...]](), list[tuple[int, int]](), 0
        for piece, ((start, stop), count) in enumerate(zip(pieces, counts, strict=True)):
            rows.append((start, stop - start, count, before))
            tiles += [(piece, tile) for tile in range(triton.cdiv(count, TILE.value))]
            before += count
        on_host = torch.tensor(rows, dtype=torch.int64), torch.tensor(tiles, dtype=torch.int32)
        return Table(on_host[0].to(self._device), on_host[1].to(self._device), before)

    def places(self, places: Sequence[int]) -> torch.Tensor:
        """Return the first byte of the block of each piece, for kernels."""
        return torch.tensor(places, dtype=torch.int64).to(self._device)

    def pack(
        self, table: Table, payloads: torch.Tensor, places: torch.Tensor, indices: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Queue what writes blocks from entries: their indices in the bucket, int64, and their values."""
        state = torch.zeros(len(table.rows) * STATE.value, dtype=torch.int32, device=self._device)
        self._start(pack, table, (payloads, places, indices, values, state), (self._bits,))

    def merge(
        self,
        table: Table,
        payloads: torch.Tensor,
        places: torch.Tensor,
        others: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> None:
        """Queue what adds blocks to those at `places`; what falls out is added to the residual, where there is one."""
        pieces, tiles = len(table.rows), -(-len(table.work) // 4) * 4  # which keeps all memory aligned
        sums = torch.empty(2 * table.entries, dtype=torch.float32, device=self._device)
        work = torch.empty(2 * (tiles + table.entries), dtype=torch.int32, device=self._device)
        above, equal, indices = work.split([tiles, tiles, 2 * table.entries])
        zeros = torch.zeros(pieces * (STATE.value + HISTOGRAM.value), dtype=torch.int32, device=self._device)
        state, histograms = zeros[: pieces * STATE.value], zeros[pieces * STATE.value :]
        blocks, slots = (payloads, places, others), (sums, indices, state)
        self._start(unite, table, (*blocks, *slots), (self._bits,))
        for constants in DIGITS:
            self._start(digit, table, (*slots, histograms), constants, 8)
        self._start(count, table, (*slots, above, equal), ())
        keeps, kept = residual is not None, sums if residual is None else residual
        self._start(cut, table, (*blocks, *slots, above, equal, kept), (keeps, self._bits))

    def put(self, table: Table, payloads: torch.Tensor, places: torch.Tensor, bucket: torch.Tensor, adds: bool) -> None:
        """Queue what puts entries in place, or adds them there."""
        self._start(put, table, (payloads, places, bucket), (adds, self._bits))

    def look(self, bucket: torch.Tensor, firsts: torch.Tensor, found: torch.Tensor) -> None:
        """Queue what says in `found`, of two int32, whether a piece is NaN; `firsts`: where each begins."""
        self._starter.start(look_at_firsts, 1, (bucket, firsts, firsts.numel(), found[1:], found), (_LOOKS,))

    def _start(
        self, kernel: Any, table: Table, arguments: Sequence[Any], constants: Sequence[Any], warps: int = 4
    ) -> None:
        self._starter.start(kernel, len(table.work), (table.rows, table.work, *arguments), constants, warps)
