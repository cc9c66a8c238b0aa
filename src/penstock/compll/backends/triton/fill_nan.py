"""NaN for whole tensors of a bucket on the device, where something in them was not finite; the host is not asked."""

import triton
import triton.language as tl

from penstock.compll.backends.triton.prelude import copy_bytes

FLAGS_OFFSET = tl.constexpr(6)  # `codecs/header.py`: the byte that says whether a gradient was finite
NOT_FINITE_FLAG = tl.constexpr(2)


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


@triton.jit(do_not_specialize=["count"])
def look_at_firsts(values_ptr, firsts_ptr, count, status_ptr, found_ptr, BLOCK: tl.constexpr):
    """Say whether the first value of some piece is NaN, as all of it then are; and what decoding has reported."""
    seen = tl.zeros([BLOCK], tl.int32)
    for block in tl.range(0, tl.cdiv(count, BLOCK)):
        i = block * BLOCK + tl.arange(0, BLOCK)
        first = tl.load(values_ptr + tl.load(firsts_ptr + i, mask=i < count, other=0), mask=i < count, other=0.0)
        seen = seen | (first != first).to(tl.int32)
    tl.store(found_ptr, tl.max(seen, axis=0))
    tl.store(found_ptr + 1, tl.load(status_ptr))
