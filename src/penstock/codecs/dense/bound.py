"""Calls of a codec on memory that stays: all that can be looked up or checked once is done when they are made.

A bucket has many small tensors, and an encode of one takes longer in the interpreter than in its kernel. In training
the same memory is encoded again and again, and headers differ by the size of their body only: one that was made or
checked once is known again by its bytes. Whatever is out of the ordinary (a first encode, a gradient that is not
finite, a damaged payload) goes the codec's usual way from the beginning. Encoding and decoding 160 small tensors whose
payloads differ in size took 3.2 to 4.1 ms the usual way (`docs/decisions/0019-batches-of-small-tensors.md`).

Each function returns None where only the usual way will do.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.codecs.codec import (
    Bound,
    Decoded,
    DecodeFrom,
    Encoded,
    EncodeInto,
    HeaderCodec,
    Source,
    from_source,
    not_finite,
)
from penstock.codecs.elements import room
from penstock.codecs.feedback import Residual
from penstock.codecs.header import FLAGS_OFFSET, Header, pack_header
from penstock.compll.backends.numba.backend import BODY, LAST, OTHER, PIECES, VALUES

if TYPE_CHECKING:
    from penstock.codecs.dense.dense_codec import DenseCodec

KEPT = 64  # headers, of so many sizes of a payload
_NOTHING = object()  # in place of a payload that is to be subtracted


def encodes(codec: "DenseCodec", pieces: Sequence[Encoded]) -> Bound | None:
    """Return one compiled call that scales and encodes all pieces, where payloads have one size."""
    if codec.on_nonfinite == "skip" or not all(_keeps(codec, each) for each in pieces):
        return None
    sizes = [codec.max_nbytes(each.values.size) for each in pieces]
    bodies = [room(each.out, size)[codec.header_nbytes : size] for each, size in zip(pieces, sizes, strict=True)]
    table = _Table(codec, [each.values for each in pieces], bodies, [each.source for each in pieces])
    residuals, defers = [each.residual for each in pieces], codec.kernels.defers
    table.addresses[:, OTHER] = [_address(each.memory) for each in residuals]
    table.factors[:] = [each.factor for each in residuals]
    kernel = codec.kernels.bound(f"encode_{'later' if defers else 'feedback'}{PIECES}", codec.arguments)
    usual = [from_source(HeaderCodec.bind_encode(codec, *each[:3]), each.source, each.values) for each in pieces]
    lasts: list[Any] = [_NOTHING if defers else None] * len(pieces)  # what is pending of each, as the table has it
    high = np.uint32(codec.seed)

    def encode_usually() -> None:
        for call in usual:
            call()
        if defers:
            lasts[:] = [_NOTHING if each.pending is None else each.pending for each in residuals]
            if all(each is not _NOTHING for each in lasts):
                table.addresses[:, LAST] = [_address(each) for each in lasts]

    def encode() -> None:
        for residual, last in zip(residuals, lasts, strict=True):
            if residual.pending is not last or (defers and residual.codec is not codec):
                encode_usually()
                return
        if table.sources and not table.find_sources():
            encode_usually()
            return
        seed = np.uint32(codec.next_seeds(len(pieces)) & 0xFFFFFFFF)
        done = kernel(table.addresses, table.factors, table.headers, 0, seed, high)
        while done < len(pieces):
            residuals[done].pending = None
            usual[done]()  # which finds what is not finite, in either, and says so
            lasts[done] = _NOTHING if defers else None
            done = kernel(table.addresses, table.factors, table.headers, done + 1, seed, high)

    return encode


def decodes(codec: "DenseCodec", usual: Sequence[Bound], pieces: Sequence[Decoded], adds: bool) -> Bound | None:
    """Return one compiled call that decodes all pieces or, `factor` times, adds them, where payloads have one size.

    Either all of them have a source, which is added to, or none has.
    """
    if not all(_has_one_size(codec, each.out) for each in pieces):
        return None
    start, sizes = codec.header_nbytes, [codec.max_nbytes(each.out.size) for each in pieces]
    if any(not _is_memory(each.payload) or each.payload.size < size for each, size in zip(pieces, sizes, strict=True)):
        return None
    bodies = [each.payload[start:size] for each, size in zip(pieces, sizes, strict=True)]
    sources = [each.source for each in pieces]
    table = _Table(codec, [each.out for each in pieces], bodies, sources, OTHER)
    table.factors[:] = [each.factor for each in pieces]
    kind = "decode" if not adds else "decode_add" if sources[0] is None else "decode_add_to"
    kernel = codec.kernels.bound(f"{kind}{PIECES}", codec.arguments)
    usual = [from_source(decode, each.source, each.out) for decode, each in zip(usual, pieces, strict=True)]
    zero = np.uint32(0)

    def decode() -> None:
        done = 0
        if table.sources and not table.find_sources():
            for each in usual:
                each()
            return
        while (done := kernel(table.addresses, table.factors, table.headers, done, zero, zero)) < len(pieces):
            usual[done]()  # which says what is damaged
            done += 1

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


class _Table:
    """What a kernel for several pieces is given: their sizes, addresses, factors and headers. It keeps their memory."""

    def __init__(
        self,
        codec: "DenseCodec",
        values: Sequence[Any],
        bodies: Sequence[Any],
        sources: Sequence[Source | None],
        column: int = VALUES,
    ) -> None:
        """`column`: that of the addresses of sources, which are found anew for each call."""
        self.addresses = np.zeros((len(values), LAST + 1), np.int64)
        self.addresses[:, 0] = [each.size for each in values]
        self.addresses[:, 1] = [each.size for each in bodies]
        self.addresses[:, BODY] = [_address(each) for each in bodies]
        self.addresses[:, VALUES] = [_address(each) for each in values]
        self.factors = np.ones(len(values), np.float32)
        headers = [_header(codec, each.size, body.size) for each, body in zip(values, bodies, strict=True)]
        self.headers = np.frombuffer(b"".join(headers), np.uint8).reshape(len(values), codec.header_nbytes)
        self._column, self._memory = column, (*values, *bodies)
        self.sources = [(row, each) for row, each in enumerate(sources) if each is not None]

    def find_sources(self) -> bool:
        """Note where sources are in this iteration; False where one is not memory that kernels can read."""
        for row, source in self.sources:
            found = source()
            if not _is_plain(found) or found.size != self.addresses[row, 0]:
                return False
            self.addresses[row, self._column] = _address(found)
        return True


def _keeps(codec: "DenseCodec", piece: Encoded) -> bool:
    """Whether what a piece leaves can be kept in the pass that encodes it."""
    values, residual, out, _ = piece
    if not isinstance(residual, Residual) or not _has_one_size(codec, values) or not _is_memory(out):
        return False
    return _is_plain(residual.memory) and residual.memory.size == values.size


def _has_one_size(codec: "DenseCodec", values: Any) -> bool:
    return not codec.capabilities.variable_size and _is_plain(values)


def _is_plain(values: Any) -> bool:
    """Whether kernels take the values as they are."""
    return _is_memory(values) and values.dtype == np.float32 and values.size > 0


def _is_memory(values: Any) -> bool:
    """Whether an array is all that lies between its first byte and its last."""
    return isinstance(values, np.ndarray) and values.flags.c_contiguous and values.flags.aligned


def _address(values: Any) -> int:
    address: int = values.__array_interface__["data"][0]
    return address


def _header(codec: "DenseCodec", numel: int, body_nbytes: int) -> bytes:
    return pack_header(Header(codec.program.name, codec.settings, numel, body_nbytes, 0))


def _make_room(kept: dict[Any, Any]) -> None:
    """Forget the oldest of what is kept where there is too much of it."""
    while len(kept) >= KEPT:
        del kept[next(iter(kept))]
