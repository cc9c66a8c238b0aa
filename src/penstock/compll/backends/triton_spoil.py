"""NaN for whole tensors of a bucket on the device, where something in them was not finite; the host is not asked."""

from typing import Any

import torch
import triton
import triton.language as tl

from penstock.compll.backends.triton_launch import Starter
from penstock.compll.backends.triton_prelude import is_finite

BLOCK = 1024


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
def spoil(values_ptr, starts_ptr, stops_ptr, flags_ptr, BLOCK: tl.constexpr):
    """One piece for each program: NaN everywhere where its flag is up; next to no time where it is not."""
    if tl.load(flags_ptr + tl.program_id(0)) != 0:
        stop = tl.load(stops_ptr + tl.program_id(0))
        for start in tl.range(tl.load(starts_ptr + tl.program_id(0)), stop, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(values_ptr + at, tl.full([BLOCK], float("nan"), tl.float32), mask=at < stop)


class Spoiler:
    """The pieces of one bucket, (start, stop) each; `flags` is int32 memory, one for each."""

    def __init__(self, pieces: Any, flags: Any) -> None:
        self._flags, self._starter = flags, Starter()
        self._starts, self._stops = (
            torch.tensor(pieces, dtype=torch.int64).view(-1, 2).t().contiguous().to(flags.device)
        )

    def look(self, values: Any, edges: Any) -> None:
        """Raise the flags of pieces among whose values one is not finite: those from an edge to the next, int64."""
        self._start(look, values, edges, self._flags)

    def spoil(self, bucket: Any) -> None:
        """Make NaN of the pieces whose flag is up."""
        self._start(spoil, bucket, self._starts, self._stops, self._flags)

    def _start(self, kernel: Any, *arguments: Any) -> None:
        if self._flags.numel():
            self._starter.start(kernel, self._flags.numel(), arguments, (BLOCK,))
