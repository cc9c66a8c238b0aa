"""What programs, the exchange and planning ask of a compressor, and the base class of one written in Python.

    Codec           the interface: sizes, encode, decode, and `Capabilities` that say what else it can do
    HeaderCodec     payloads begin with a header (`header.py`); decides what NaN and infinity do, for all our codecs
    PythonCodec     three methods on numpy arrays make a codec (docs/codecs/README.md has an example)

NaN and infinity: `encode` raises `NonFiniteError`. A program must not, in the middle of a collective, where all other
ranks would wait for this one. So the calls that programs make (`bind_...`) write a payload that says "not finite"
instead; every rank decodes it to NaN, as it would without a codec, and notes it. Afterwards, on all ranks alike, the
communicator raises it (`check_finite`), or the exchange asks for it (`saw_nonfinite`), by the codec's `on_nonfinite`.

Needs neither torch nor a compiler: a job without codecs imports this file.
"""

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, ClassVar, NamedTuple, Self
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from penstock.codecs.elements import as_array, from_float32, room, to_float32
from penstock.codecs.header import (
    BODY_NBYTES,
    FLAGS_OFFSET,
    NOT_FINITE,
    Header,
    header_nbytes,
    pack_header,
    parse_header,
)
from penstock.errors import CodecError, NonFiniteError, shorten

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Bound = Callable[[], Any]  # a call on memory that stays
Source = Callable[[], Any]  # where a framework has a gradient in this iteration; it is not to be changed
EncodeInto = Callable[[Bytes], int]  # writes a payload to where it is given room; returns its bytes
DecodeFrom = Callable[[Bytes], int]  # reads the payload that bytes begin with; returns its bytes
NOTE = "note"  # `on_nonfinite` of a codec whose owner asks `saw_nonfinite`
_READING = Lock()
_SOURCES: WeakKeyDictionary[type, str] = WeakKeyDictionary()
ADVICE = 'fix the loss, or pass on_nonfinite="skip" if a gradient scaler skips such steps'


class Encoded(NamedTuple):
    """A piece to be encoded."""

    values: Any
    residual: Any
    out: Any
    source: Source | None = None  # where its values are instead; `values` is memory to work in


class Decoded(NamedTuple):
    """A piece to be decoded."""

    payload: Any
    out: Any
    factor: float = 1.0  # that its values are multiplied by where they are added
    source: Source | None = None  # what they are added to; None: `out` itself


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a codec can do beside encode and decode."""

    deferred_feedback: bool = False  # takes a `Residual`: scales what it reads, may subtract in the next encode
    variable_size: bool = False  # payloads of as many elements differ in size; `payload_nbytes` reads it
    merging: bool = False  # adds encoded blocks: `merge`
    half_precision: bool = False  # encodes and decodes float16 and bfloat16 (as uint16), not only float32
    scaled_add: bool = False  # `decode_add` takes a factor
    reads_sources: bool = False  # reads what is elsewhere there, in the pass that encodes it or adds to it
    device_form: bool = False  # has kernels for a GPU: `on_device`
    sums_factors: bool = False  # makes no payloads: ranks sum thin matrices, dense (`low_rank.py`)
    defers_nonfinite_check: bool = False  # on a GPU, values that are not finite may be noted one call later


class Codec(ABC):
    """Turns elements into bytes and back. Both sides of a message reserve `max_nbytes` for it.

    All of it is sent, too, unless payloads vary in size. Methods get views of memory that is reused: they must not keep
    them. Programs call what the `bind_...` methods return; their defaults call the plain methods.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()
    takes_feedback: ClassVar[bool] = True  # whether a residual helps; with noise larger than the values it would grow
    on_nonfinite: str = "raise"  # of NaN and infinity: raise, skip the step (residuals stay as they were), or note

    @property
    @abstractmethod
    def name(self) -> str:
        """The codec and its settings: ranks compare it before data move, and plans write it."""

    @abstractmethod
    def max_nbytes(self, numel: int) -> int:
        """Return how many bytes the payload of `numel` elements can take."""

    @abstractmethod
    def encode(self, read: Any, residual: Any, out: Any) -> int:
        """Write the payload of `read` and return its bytes; raise `NonFiniteError` for NaN and infinity.

        `residual`, float32 and as large as `read`, is added first and left holding what was not sent; or it is None.
        """

    @abstractmethod
    def decode(self, read: Any, out: Any) -> None:
        """Write the values of the payload that `read` begins with."""

    @abstractmethod
    def decode_add(self, read: Any, out: Any) -> None:
        """Add the values of a payload; with `scaled_add`, a third argument multiplies them."""

    def merge(self, read: Any, write: Any, residual: Any) -> None:
        """Add a payload to another, in place; what does not fit any more is added to `residual`."""
        raise CodecError(f"{self.name} cannot add encoded blocks; use a sparse codec")

    def payload_nbytes(self, payload: Any) -> int:
        """Return the bytes of the payload that a buffer begins with."""
        raise CodecError(f"payloads of {self.name} do not say how long they are")

    def on_device(self, device: Any, note: Callable[[], None] | None = None) -> Any:
        """Return the codec's form on a device (`payload_block.DeviceForm`), None where it has none.

        With `note`, which is told of values that are not finite, it is one of its own: forms work in memory that one
        stream at a time may use.
        """
        return None

    def for_bucket(self, number: int) -> Self:
        """Return the codec for one of several buckets that are under way together, in which it has that number.

        What it notes and draws does not depend on which of them comes first.
        """
        found = copy(self)
        object.__setattr__(found, "_why", "")
        return found

    def begin(self, iteration: int) -> None:  # noqa: B027  # a codec that draws nothing does nothing
        """Draw what this iteration always draws, so that a resumed run rounds as an unbroken one would."""

    @property
    def fingerprint(self) -> str:
        """Of what the codec is made from, beside its name; ranks compare it before data move.

        Here: of the class, its source where there is one, and its public settings that are numbers or texts.
        """
        kind = type(self)
        plain = (bool, int, float, str, tuple, type(None))
        settings = {
            key: value for key, value in vars(self).items() if not key.startswith("_") and isinstance(value, plain)
        }
        settings.pop("on_nonfinite", None)
        text = f"{kind.__module__}.{kind.__qualname__}\n{sorted(settings.items())}\n{_source(kind)}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    # What programs call

    def bind_encode(self, values: Any, residual: Any, out: Any) -> Bound:
        """Return `encode` of memory that stays."""
        return partial(self.encode, values, residual, out)

    def bind_decode(self, payload: Any, out: Any, adds: bool, factor: float = 1.0) -> Bound:
        """Return `decode`, or `decode_add` of `factor` times the values, of memory that stays."""
        if not adds:
            return partial(self.decode, payload, out)
        return partial(self.decode_add, payload, out, *(() if factor == 1.0 else (factor,)))

    def bind_encodes(self, pieces: Sequence[Encoded]) -> Bound:
        """Return `encode` of several pieces, one after the other."""
        calls = [self.bind_encode(*each[:3]) for each in pieces]
        return _in_turn(from_source(call, each.source, each.values) for call, each in zip(calls, pieces, strict=True))

    def bind_decodes(self, pieces: Sequence[Decoded], adds: bool) -> Bound:
        """Return `decode` or `decode_add` of several pieces, one after the other; all with a source, or none."""
        calls = [self.bind_decode(each.payload, each.out, adds, each.factor) for each in pieces]
        return _in_turn(from_source(call, each.source, each.out) for call, each in zip(calls, pieces, strict=True))

    def bind_encode_into(self, values: Any, residual: Any) -> EncodeInto:
        """Return `encode` of values that stay; payloads differ in size and thus in place."""
        return partial(self.encode, values, residual)

    def bind_decode_from(self, out: Any, adds: bool) -> DecodeFrom:
        """Return `decode` or `decode_add` of a payload that may be anywhere."""

        def decode_from(payload: Bytes) -> int:
            self.bind_decode(payload, out, adds)()
            return self.payload_nbytes(payload)

        return decode_from

    # Values that are not finite

    _why = ""  # the first reason noted since it was asked for last

    def note_nonfinite(self, why: str = "a gradient holds NaN or infinity on some rank") -> None:
        """Note values that were not finite, encoded or decoded here or sent decoded by another rank."""
        object.__setattr__(self, "_why", self._why or why)

    def saw_nonfinite(self) -> bool:
        """Say whether anything was noted since the last time this was asked, and forget it."""
        seen = bool(self._why)
        object.__setattr__(self, "_why", "")
        return seen

    def check_finite(self) -> None:
        """Raise `NonFiniteError` with what was noted since the last time, where the codec is to raise it."""
        why = self._why
        if why and self.on_nonfinite != NOTE and self.saw_nonfinite() and self.on_nonfinite == "raise":
            raise NonFiniteError(why)


class HeaderCodec(Codec):
    """A codec whose payloads begin with a header: of what is not finite, the payload has a header only."""

    @abstractmethod
    def refuse(self, numel: int, out: Any) -> int:
        """Write the payload of `numel` values that are not finite; return its bytes."""

    def payload_nbytes(self, payload: Any) -> int:
        """Return the bytes of a payload, as its header says; `decode` checks it."""
        return self.header_nbytes + int.from_bytes(payload[BODY_NBYTES].tobytes(), "little")

    @property
    @abstractmethod
    def header_nbytes(self) -> int:
        """Bytes of the header before every body."""

    def bind_encode(self, values: Any, residual: Any, out: Any) -> Bound:
        """Return an encode that does not raise for values that are not finite: their payload says so."""
        encode_into = self.bind_encode_into(values, residual)
        return lambda: encode_into(out)

    def bind_encode_into(self, values: Any, residual: Any) -> EncodeInto:
        """Return the same for payloads that may be anywhere."""

        def encode_into(out: Any) -> int:
            try:
                return self.encode(values, residual, out)
            except NonFiniteError as error:
                self.note_nonfinite(str(error))
                return self.refuse(values.size, out)

        return encode_into

    def bind_decode(self, payload: Any, out: Any, adds: bool, factor: float = 1.0) -> Bound:
        """Return a decode of the payload that a buffer begins with; one of values that are not finite is noted."""
        decode: Callable[..., None] = self.decode_add if adds else self.decode
        scaled = (factor,) if adds and factor != 1.0 else ()

        def note_and_decode() -> None:
            if payload.size > FLAGS_OFFSET and payload[FLAGS_OFFSET] & NOT_FINITE:
                self.note_nonfinite("a gradient of another rank holds NaN or infinity; the message there says more")
            decode(payload[: self.payload_nbytes(payload)], out, *scaled)

        return note_and_decode


class PythonCodec(HeaderCodec):
    """A codec of three methods on float32 arrays; header, error feedback, 16-bit gradients and NaN are seen to here.

    A subclass has a `name` of at most 16 letters that no other codec has. Ranks compare it, the class's source and
    its public attributes: what changes, or may differ between ranks, as a seed, has a name that begins with an
    underscore. With `takes_feedback = False` no residual is kept for it in training.
    """

    capabilities = Capabilities(half_precision=True)

    @abstractmethod
    def max_body_nbytes(self, numel: int) -> int:
        """Return how many bytes `numel` values can take."""

    @abstractmethod
    def encode_body(self, values: Floats, body: Bytes) -> int:
        """Write the encoded form of finite `values`; return its bytes. `body` has room for the most."""

    @abstractmethod
    def decode_body(self, body: Bytes, values: Floats) -> None:
        """Write to `values` what a body stands for."""

    @property
    def header_nbytes(self) -> int:
        """Bytes of the header before every body."""
        return header_nbytes(0)

    def max_nbytes(self, numel: int) -> int:
        """Return how many bytes the payload of `numel` elements can take."""
        return self.header_nbytes + self.max_body_nbytes(numel)

    def encode(self, read: Any, residual: Any, out: Any) -> int:
        """Write the payload of `read` plus `residual`, which keeps what is not in it; return the payload's bytes."""
        values = to_float32(as_array(read))
        payload = room(out, self.max_nbytes(values.size))
        total = values if residual is None else values + as_array(residual)
        if not np.isfinite(total).all():
            if self.on_nonfinite == "skip":
                return self.refuse(values.size, out)
            raise NonFiniteError(not_finite())
        nbytes = self.encode_body(total, payload[self.header_nbytes : self.max_nbytes(values.size)])
        self._write_header(payload, values.size, nbytes)
        if residual is not None:
            np.subtract(total, self._decoded(payload, values.size), out=as_array(residual))
        return self.header_nbytes + nbytes

    def refuse(self, numel: int, out: Any) -> int:
        """Write the payload of values that are not finite; return its bytes."""
        self._write_header(as_array(out), numel, 0, NOT_FINITE)
        return self.header_nbytes

    def decode(self, read: Any, out: Any) -> None:
        """Write the values of a payload; NaN where they were not finite."""
        target = as_array(out)
        from_float32(self._decoded(as_array(read), target.size), target)

    def decode_add(self, read: Any, out: Any) -> None:
        """Add the values of a payload."""
        target = as_array(out)
        from_float32(to_float32(target) + self._decoded(as_array(read), target.size), target)

    def _decoded(self, payload: Bytes, numel: int) -> Floats:
        header = parse_header(payload.data)
        if (header.codec, header.numel) != (self.name, numel):
            raise CodecError(
                f"payload of {header.numel} elements by {header.codec}; wanted {numel} by {self.name}: all ranks need "
                "the same codec and tensors"
            )
        if header.body_nbytes > min(self.max_body_nbytes(numel), payload.size - header.nbytes):
            raise CodecError(f"{self.name}: body of {header.body_nbytes} bytes is more than {numel} elements can take")
        if header.flags & NOT_FINITE:
            return np.full(numel, np.nan, np.float32)
        values = np.empty(numel, np.float32)
        try:
            self.decode_body(payload[header.nbytes : header.nbytes + header.body_nbytes], values)
        except (ValueError, IndexError, OverflowError, ZeroDivisionError) as error:  # as numpy has it for such bodies
            raise CodecError(
                f"{self.name}: decode_body takes no body of {header.body_nbytes} bytes for {numel} elements "
                f"({shorten(error)}): the payload is damaged, or decode_body is wrong"
            ) from error
        return values

    def _write_header(self, payload: Bytes, numel: int, nbytes: int, flags: int = 0) -> None:
        packed = pack_header(Header(self.name, (), numel, nbytes, flags))
        payload[: len(packed)] = np.frombuffer(packed, np.uint8)


def _source(kind: type) -> str:
    """Return the text of a class, empty where it has none; Python finds it for one thread at a time only."""
    with _READING:
        if kind not in _SOURCES:
            try:
                _SOURCES[kind] = inspect.getsource(kind)
            except (OSError, TypeError):  # typed in, or compiled
                _SOURCES[kind] = ""
        return _SOURCES[kind]


def from_source(call: Bound, source: Source | None, values: Any) -> Bound:
    """Return a call that works in `values`: with a source, what is there then is copied to them first."""
    if source is None:
        return call

    def copy_and_call() -> Any:
        np.copyto(values, source())
        return call()

    return copy_and_call


def _in_turn(calls: Iterable[Bound]) -> Bound:
    """Return what makes calls one after the other."""
    made = list(calls)

    def call_each() -> None:
        for call in made:
            call()

    return made[0] if len(made) == 1 else call_each


def not_finite(tensor: str = "the gradient") -> str:
    """Return what an error says of values that are not finite."""
    return f"{tensor} holds NaN or infinity; {ADVICE}"
