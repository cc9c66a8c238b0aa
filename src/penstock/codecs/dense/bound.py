"""Calls of a codec on memory that stays: all that can be looked up or checked once is done when they are made.

A bucket has many small tensors, and an encode of one takes longer in the interpreter than in its kernel. In training
the same memory is encoded again and again, and headers differ by the size of their body only: one that was made or
checked once is known again by its bytes. Whatever is out of the ordinary (a first encode, a gradient that is not
finite, a damaged payload) goes the codec's usual way from the beginning. Encoding and decoding 160 small tensors whose
payloads differ in size took 3.2 to 4.1 ms the usual way (`docs/decisions/0019-batches-of-small-tensors.md`).

Each function returns None where only the usual way will do.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.codecs.codec import Bound, DecodeFrom, EncodeInto, HeaderCodec, Source, not_finite
from penstock.codecs.elements import room
from penstock.codecs.feedback import Residual
from penstock.codecs.header import FLAGS_OFFSET, Header, pack_header

if TYPE_CHECKING:
    from penstock.codecs.dense.dense_codec import DenseCodec

KEPT = 64  # headers, of so many sizes of a payload


def encode(codec: "DenseCodec", values: Any, residual: Any, out: Any, source: Source | None = None) -> Bound | None:
    """Return an encode that scales and keeps what it does not send, where payloads have one size; of a `source`."""
    if not isinstance(residual, Residual) or not _has_one_size(codec, values) or codec.on_nonfinite == "skip":
        return None
    room(out, codec.max_nbytes(values.size))
    usual, given = HeaderCodec.bind_encode(codec, values, residual, out), source or (lambda: values)
    usual = usual if source is None else partial(_with_source, usual, source, values)
    kernel = codec.kernels.bound("encode_later" if codec.kernels.defers else "encode_feedback", codec.arguments)
    head, body = out[: codec.header_nbytes], out[codec.header_nbytes : codec.max_nbytes(values.size)]
    header, seed = np.frombuffer(_header(codec, values.size, body.size), np.uint8), np.uint32(codec.seed)
    factor, memory, nbytes = np.float32(residual.factor), residual.memory, body.size

    def encode_at_once() -> Any:
        if residual.pending is not None:
            return usual()
        call = np.uint32(next(codec._calls) & 0xFFFFFFFF)
        if kernel(given(), factor, memory, body, call, seed) != nbytes:
            return usual()  # which finds what is not finite, in either, and says so
        head[:] = header
        return None

    def encode() -> Any:
        last = residual.pending
        if last is None or residual.codec is not codec:
            return usual()
        call = np.uint32(next(codec._calls) & 0xFFFFFFFF)
        if kernel(given(), factor, memory, last, body, call, seed) != nbytes:
            residual.pending = None
            return usual()  # which finds what is not finite, in either, and says so
        last[:] = body
        head[:] = header
        return None

    return encode if codec.kernels.defers else encode_at_once


def decode(
    codec: "DenseCodec",
    usual: Bound,
    payload: Any,
    out: Any,
    adds: bool,
    factor: float,
    source: Source | None = None,  # what it adds to; None: `out` itself
) -> Bound | None:
    """Return a decode that writes or, `factor` times, adds, where payloads have one size."""
    if not _has_one_size(codec, out):
        return None
    kernel = codec.kernels.bound("decode_add" if adds else "decode", codec.arguments)
    head, body = payload[: codec.header_nbytes], payload[codec.header_nbytes : codec.max_nbytes(out.size)]
    header, scaled = _header(codec, out.size, body.size), (np.float32(factor),) if adds else ()
    if source is not None:
        onto = codec.kernels.bound("decode_add_to", codec.arguments)

        def decode_onto() -> None:
            if head.tobytes() != header or onto(body, source(), out, *scaled) != 0:
                _with_source(usual, source, out)

        return decode_onto

    def decode() -> None:
        if head.tobytes() != header or kernel(body, out, *scaled) != 0:
            usual()

    return decode


def encode_into(codec: "DenseCodec", values: Any, residual: Any) -> EncodeInto | None:
    """Return an encode for payloads that may be anywhere."""
    if not _is_plain(values) or not (residual is None or _is_plain(residual)) or codec.on_nonfinite == "skip":
        return None
    kernels, start, stop = codec.kernels, codec.header_nbytes, codec.max_nbytes(values.size)
    operands = (values,) if residual is None else (values, np.float32(1), residual)
    encode = kernels.bound("encode" if residual is None else "encode_feedback", codec.arguments)
    owes = residual is not None and kernels.subtracts
    subtract = kernels.bound("decode_add", codec.arguments) if owes else None
    seed, taken_off, headers = np.uint32(codec.seed), np.float32(-1.0), dict[int, Any]()

    def encode_into(out: Any) -> int:
        if out.size < stop:
            room(out, stop)  # which says so
        call = np.uint32(next(codec._calls) & 0xFFFFFFFF)
        nbytes = encode(*operands, out[start:stop], call, seed)
        if nbytes < 0:
            codec.note_nonfinite(not_finite())
            return codec.refuse(values.size, out)
        if subtract is not None:
            subtract(out[start : start + nbytes], residual, taken_off)
        if nbytes not in headers:
            _make_room(headers)
            headers[nbytes] = np.frombuffer(_header(codec, values.size, nbytes), np.uint8)
        out[:start] = headers[nbytes]
        return start + nbytes

    return encode_into


def decode_from(codec: "DenseCodec", usual: DecodeFrom, out: Any, adds: bool) -> DecodeFrom | None:
    """Return a decode of payloads that may be anywhere."""
    if not _is_plain(out):
        return None
    start, kernel = codec.header_nbytes, codec.kernels.bound("decode_add" if adds else "decode", codec.arguments)
    factor, known = (np.float32(1.0),) if adds else (), dict[bytes, int]()  # bytes behind each header

    def decode_from(payload: Any) -> int:
        head = payload[:start].tobytes()
        if head not in known:
            nbytes = usual(payload)  # which checks it
            if not head[FLAGS_OFFSET]:
                _make_room(known)
                known[head] = nbytes - start
            return nbytes
        body = payload[start : start + known[head]]
        try:
            good = kernel(body, out, *factor) == 0
        except IndexError:  # from an operator
            good = False
        if not good:
            usual(payload)  # which says what is damaged
        return start + len(body)

    return decode_from


def _with_source(usual: Bound, source: Source, values: Any) -> Any:
    """Go the usual way, which works in `values`."""
    np.copyto(values, source())
    return usual()


def _has_one_size(codec: "DenseCodec", values: Any) -> bool:
    return not codec.capabilities.variable_size and _is_plain(values)


def _is_plain(values: Any) -> bool:
    """Whether kernels take the values as they are."""
    return isinstance(values, np.ndarray) and values.dtype == np.float32 and values.size > 0


def _header(codec: "DenseCodec", numel: int, body_nbytes: int) -> bytes:
    return pack_header(Header(codec.program.name, codec.settings, numel, body_nbytes, 0))


def _make_room(kept: dict[Any, Any]) -> None:
    """Forget the oldest of what is kept where there is too much of it."""
    while len(kept) >= KEPT:
        del kept[next(iter(kept))]
