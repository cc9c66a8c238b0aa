"""Calls of a codec whose payloads differ in size, on values that stay: `bound.py` has those of one size.

Values and residual are the same memory in every iteration, while a payload begins wherever the one before it ends
(`runtime/packed.py`). All else is looked up when the call is made. Headers differ by the size of their body only: those
that were written are kept, and those that were checked once are known again by their bytes. Encoding and decoding 160
small tensors took 3.2 to 4.1 ms by the codec's usual methods (`docs/decisions/0019-batches-of-small-tensors.md`).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.codecs.dense.codec import Codec
from penstock.codecs.header import FLAGS_OFFSET, Header, pack_header

KEPT = 64  # headers, of so many sizes of a payload
EncodeInto = Callable[[Any], int]  # writes a payload to where it is given room; returns its bytes
DecodeFrom = Callable[[Any], int]  # reads the payload that bytes begin with; returns its bytes


def bound_encode_into(codec: Codec, refuse: EncodeInto, values: Any, residual: Any) -> EncodeInto | None:
    """Return what encodes `values` plus `residual`; `refuse` writes the payload of what is not finite.

    None where only the usual way will do.
    """
    if not _is_plain(values) or not (residual is None or _is_plain(residual)) or codec.on_nonfinite != "raise":
        return None
    kernels, start, stop = codec.kernels, codec.header_nbytes, codec.max_nbytes(values.size)
    operands = (values,) if residual is None else (values, residual)
    encode = kernels.bound("encode" if residual is None else "encode_feedback", codec.arguments)
    owes = residual is not None and kernels.subtracts
    subtract = kernels.bound("decode_add", codec.arguments) if owes else None
    seed, taken_off, headers = np.uint32(codec.seed), np.float32(-1.0), dict[int, Any]()

    def encode_into(out: Any) -> int:
        call = np.uint32(next(codec._calls) & 0xFFFFFFFF)
        nbytes = encode(*operands, out[start:stop], call, seed)
        if nbytes < 0:
            return refuse(out)
        if subtract is not None:
            subtract(out[start : start + nbytes], residual, taken_off)
        if nbytes not in headers:
            _make_room(headers)
            headers[nbytes] = np.frombuffer(pack_header(_header(codec, values.size, nbytes)), np.uint8)
        out[:start] = headers[nbytes]
        return start + nbytes

    return encode_into


def bound_decode_from(codec: Codec, usual: Callable[..., None], out: Any, adds: bool) -> DecodeFrom | None:
    """Return what writes a payload's values to `out`, or adds them; `usual(payload, out)` for what is not ordinary."""
    if not _is_plain(out):
        return None
    start, kernel = codec.header_nbytes, codec.kernels.bound("decode_add" if adds else "decode", codec.arguments)
    factor, known = (np.float32(1.0),) if adds else (), dict[bytes, int]()  # bytes behind each header

    def decode_from(payload: Any) -> int:
        head = payload[:start].tobytes()
        if head not in known:
            usual(payload, out)  # which checks it
            nbytes = codec.payload_nbytes(payload)
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
            usual(payload, out)  # which says what is damaged
        return start + len(body)

    return decode_from


def _is_plain(values: Any) -> bool:
    """Whether kernels take the values as they are."""
    return isinstance(values, np.ndarray) and values.dtype == np.float32 and values.size > 0


def _header(codec: Codec, numel: int, body_nbytes: int) -> Header:
    return Header(codec.program.name, codec.settings, numel, body_nbytes, 0)


def _make_room(kept: dict[Any, Any]) -> None:
    """Forget the oldest of what is kept where there is too much of it."""
    while len(kept) >= KEPT:
        del kept[next(iter(kept))]
