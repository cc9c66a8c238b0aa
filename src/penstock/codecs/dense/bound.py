"""Calls of a codec on memory that stays: all that can be looked up or checked once is done when they are made.

A bucket has many small tensors, and an encode of one takes longer in the interpreter than in its kernel. In training
the same memory is encoded again and again, and of a codec whose payloads have one size the header is the same each
time: it is made once, and a payload that begins with it needs no more looking at. Whatever is out of the ordinary (a
first encode, a gradient that is not finite, a damaged payload) goes the codec's usual way, `usual`, from the beginning.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.codecs.dense.codec import Codec
from penstock.codecs.feedback import Residual
from penstock.codecs.header import Header, pack_header

Usual = Callable[..., Any]  # the codec's method, with the same operands
Bound = Callable[[], Any]


def bound_encode(codec: Codec, usual: Usual, values: Any, residual: Any, out: Any) -> Bound | None:
    """Return `usual(values, residual, out)` made quick; None where it cannot be: only feedback put off is."""
    if not isinstance(residual, Residual) or not _is_plain(codec, values) or codec.on_nonfinite != "raise":
        return None
    kernel = codec.kernels.bound("encode_later", codec.arguments)
    head, body = out[: codec.header_nbytes], out[codec.header_nbytes : codec.max_nbytes(values.size)]
    header, seed = np.frombuffer(_header(codec, values.size), np.uint8), np.uint32(codec.seed)
    factor, memory, nbytes = np.float32(residual.factor), residual.memory, body.size

    def encode() -> Any:
        last = residual.pending
        if last is None or not residual.waits_for(codec):
            return usual(values, residual, out)
        call = np.uint32(next(codec._calls) & 0xFFFFFFFF)
        if kernel(values, factor, memory, last, body, call, seed) != nbytes:
            residual.pending = None
            return usual(values, residual, out)  # which finds what is not finite, in either, and says so
        last[:] = body
        head[:] = header
        return None

    return encode


def bound_decode(codec: Codec, usual: Usual, payload: Any, out: Any, adds: bool, factor: float = 1.0) -> Bound | None:
    """Return `usual(payload, out)` made quick, which writes or, `factor` times, adds; None where it cannot be."""
    if not _is_plain(codec, out):
        return None
    kernel = codec.kernels.bound("decode_add" if adds else "decode", codec.arguments)
    head, body = payload[: codec.header_nbytes], payload[codec.header_nbytes : codec.max_nbytes(out.size)]
    header, scaled = _header(codec, out.size), (np.float32(factor),) if adds else ()

    def decode() -> None:
        if head.tobytes() != header or kernel(body, out, *scaled) != 0:
            usual(payload, out, *scaled)

    return decode


def _is_plain(codec: Codec, values: Any) -> bool:
    """Whether payloads have one size, and kernels take the values as they are."""
    fixed = not any(field.counts for field in codec.program.layout.fields)
    return fixed and isinstance(values, np.ndarray) and values.dtype == np.float32 and values.size > 0


def _header(codec: Codec, numel: int) -> bytes:
    identity = codec.program.name, codec.settings
    return pack_header(Header(*identity, numel, codec.max_nbytes(numel) - codec.header_nbytes, 0))
