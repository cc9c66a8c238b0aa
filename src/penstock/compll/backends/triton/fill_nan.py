"""NaN for whole tensors of a bucket on the device, where something in them was not finite; the host is not asked."""

from typing import Any

import torch
import triton
import triton.language as tl

from penstock.compll.backends.triton.prelude import copy_bytes, is_finite
from penstock.compll.backends.triton.starter import Starter

BLOCK = 1024
FLAGS_OFFSET = tl.constexpr(6)  # `codecs/header.py`: the byte that says whether a gradient was finite
NOT_FINITE_FLAG = tl.constexpr(2)


@triton.jit
def look(values_ptr, edges_ptr, flags_ptr, BLOCK: tl.constexpr):
    """One piece for each program: its flag says whether one of its values is not finite."""
    first, last = tl.load(edges_ptr + tl.program_id(0)), tl.load(edges_ptr + tl.program_id(0) + 1)
    wrong = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(values_ptr + at, mask=at < last, other=0.0)
        wrong = wrong | (is_finite(value) == 0).to(tl.int32)
    tl.store(flags_ptr + tl.program_id(0), tl.max(wrong, axis=0))


@triton.jit
def fill_flagged(values_ptr, starts_ptr, stops_ptr, flags_ptr, BLOCK: tl.constexpr):
    """One piece for each program: NaN everywhere where its flag is up; next to no time where it is not."""
    if tl.load(flags_ptr + tl.program_id(0)) != 0:
        stop = tl.load(stops_ptr + tl.program_id(0))
        for start in tl.range(tl.load(starts_ptr + tl.program_id(0)), stop, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(values_ptr + at, tl.full([BLOCK], float("nan"), tl.float32), mask=at < stop)


@triton.jit
def fill_nan(program, programs, out_ptr, numel, BLOCK: tl.constexpr):
    """Write NaN to a piece, as one of several programs."""
    for block in tl.range(program, tl.cdiv(numel, BLOCK), programs):
        i = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_ptr + i, tl.full([BLOCK], float("nan"), tl.float32), mask=i < numel)


@triton.jit
def mark(table_ptr, places_ptr, payload_ptr, header_ptr, flags_ptr, COLUMNS: tl.constexpr, HEADER: tl.constexpr):
    """Write the header of what is not finite over the payload of a piece whose flag is up, and take the flag down."""
    piece = tl.program_id(0)
    if tl.load(flags_ptr + piece) != 0:
        header = tl.load(table_ptr + piece * COLUMNS + 2)
        copy_bytes(payload_ptr + tl.load(places_ptr + piece) - HEADER, header_ptr + header, HEADER)
        tl.store(flags_ptr + piece, 0)


@triton.jit
def look_at_firsts(values_ptr, firsts_ptr, count, status_ptr, found_ptr, BLOCK: tl.constexpr):
    """Say whether the first value of some piece is NaN, as all of it then are; and what decoding has reported."""
    seen = tl.zeros([BLOCK], tl.int32)
    for block in tl.range(0, tl.cdiv(count, BLOCK)):
        i = block * BLOCK + tl.arange(0, BLOCK)
        first = tl.load(values_ptr + tl.load(firsts_ptr + i, mask=i < count, other=0), mask=i < count, other=0.0)
        seen = seen | (first != first).to(tl.int32)
    tl.store(found_ptr, tl.max(seen, axis=0))
    tl.store(found_ptr + 1, tl.load(status_ptr))


class NanFill:
    """The pieces of one bucket, (start, stop) each; `flags` is int32 memory, one for each."""

    def __init__(self, pieces: Any, flags: Any) -> None:
        self._flags, self._starter = flags, Starter()
        self._starts, self._stops = (
            torch.tensor(pieces, dtype=torch.int64).view(-1, 2).t().contiguous().to(flags.device)
        )

    def look(self, values: Any, edges: Any) -> None:
        """Raise the flags of pieces among whose values one is not finite: those from an edge to the next, int64."""
        self._start(look, values, edges, self._flags)

    def fill(self, bucket: Any) -> None:
        """Make NaN of the pieces whose flag is up."""
        self._start(fill_flagged, bucket, self._starts, self._stops, self._flags)

    def _start(self, kernel: Any, *arguments: Any) -> None:
        if self._flags.numel():
            self._starter.start(kernel, self._flags.numel(), arguments, (BLOCK,))
