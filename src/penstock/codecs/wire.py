"""A codec as the executor of programs calls it: views of its memory, and buffers of the largest size.

Both sides of a message reserve `max_nbytes`, and the payload is the beginning of it; the header says how much. Where
payloads vary in size (`graddrop`, `adacomp`, `3lc`; `topk` and `dgc` send fewer for less than k values that are not
zero), only that much travels.

A rank whose gradient is not finite must not fail in the middle of a collective, where all others would wait for it.
Its payload says so instead, every rank decodes NaN as it would without a codec, and `check` raises on all of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from penstock.codecs.contraction import contracts
from penstock.codecs.dense.bound import Bound, bound_decode, bound_encode
from penstock.codecs.dense.bound_packed import DecodeFrom, EncodeInto, bound_decode_from, bound_encode_into
from penstock.codecs.dense.codec import Codec, not_finite
from penstock.codecs.header import BODY_NBYTES, FLAGS_OFFSET, NOT_FINITE
from penstock.codecs.registry import make_codec, text_fingerprint
from penstock.codecs.spec import parse_spec
from penstock.errors import CodecError, NonFiniteError

if TYPE_CHECKING:  # their kernels are compiled: only who asks for a sparse codec imports them, and numba with them
    from penstock.codecs.sparse.codec import SparseCodec
    from penstock.codecs.sparse.published import PublishedCodec


def wire_codec(spec: str, seed: int = 0) -> "WireCodec | WireSparse":
    """Return the codec that a plan writes as `spec`, for the executor: any of the language, or a sparse one.

    `sparse(density=0.001)` can also have `value_bits`; `published(density=0.001)` keeps residuals as gTop-k published.
    """
    name, parameters = parse_spec(spec)
    if name not in SPARSE_CODECS:
        return WireCodec(make_codec(spec, seed))
    unknown = sorted(parameters.keys() - {"density", "value_bits"})
    if unknown:
        raise CodecError(f"codec {spec!r}: no parameter {unknown[0]!r}; wanted density and value_bits")
    return WireSparse(SPARSE_CODECS[name](**{"density": _DENSITY, **parameters}))


def _sparse(**settings: Any) -> "SparseCodec":
    from penstock.codecs.sparse.block import VALUE_BITS
    from penstock.codecs.sparse.codec import SparseCodec

    if settings.get("value_bits") in VALUE_BITS:  # also where it is written as 16.0
        settings["value_bits"] = int(settings["value_bits"])
    return SparseCodec(**settings)


def _published(**settings: Any) -> "PublishedCodec":
    from penstock.codecs.sparse.published import PublishedCodec

    return PublishedCodec(_sparse(**settings))


def fingerprint(spec: str) -> str:
    """Return what differs between ranks whose codec of this name is made from another text; empty of a sparse one."""
    return "" if parse_spec(spec)[0] in SPARSE_CODECS else text_fingerprint(spec)


_DENSITY = 0.001  # the paper's
SPARSE_CODECS: Mapping[str, "Callable[..., SparseCodec | PublishedCodec]"] = {
    "sparse": _sparse,
    "published": _published,
}


@dataclass(slots=True)
class Nonfinite:
    """Whether anything that was not finite was encoded or decoded since this was asked last."""

    why: str = ""  # what an error says of it; empty: nothing was

    def note(self, why: str = "a gradient holds NaN or infinity on some rank") -> None:
        """Keep the first reason."""
        self.why = self.why or why

    def note_payload(self, payload: Any) -> None:
        """Keep that a payload says so of the values that it was made from."""
        if payload.size > FLAGS_OFFSET and payload[FLAGS_OFFSET] & NOT_FINITE:  # shorter ones are `decode`'s to refuse
            self.note("a gradient of another rank holds NaN or infinity; the message there says more")

    def take(self) -> str:
        """Return the reason and forget it."""
        why, self.why = self.why, ""
        return why


@dataclass(frozen=True, slots=True)
class WireCodec:
    """What `runtime.codec.Codec` asks for, of a codec of the language."""

    codec: Codec
    nonfinite: Nonfinite = field(default_factory=Nonfinite, repr=False)
    _forms: dict[Any, Any] = field(default_factory=dict, repr=False)  # on each device, told by `check`

    @property
    def name(self) -> str:
        """The codec and its settings."""
        return self.codec.name

    @property
    def fingerprint(self) -> str:
        """Of the text that the codec was made from, and of the operators that it calls."""
        return self.codec.program.fingerprint

    @property
    def puts_off(self) -> bool:
        """Whether the residual is to be a `PutOff`."""
        return self.codec.puts_off

    @property
    def varies(self) -> bool:
        """Whether payloads of as many elements differ in size: some field of theirs is counted."""
        return any(field.counts for field in self.codec.program.layout.fields)

    def payload_nbytes(self, read: Any) -> int:
        """Return the bytes of the payload that `read` begins with, as it says; `decode` checks it."""
        return self.codec.header_nbytes + int.from_bytes(read[BODY_NBYTES].tobytes(), "little")

    @property
    def takes_feedback(self) -> bool:
        """Whether a residual does any good; finding out takes a few encodes."""
        return contracts(self.codec)

    def max_nbytes(self, numel: int) -> int:
        """Return how many bytes `numel` elements can need at most."""
        return self.codec.max_nbytes(numel)

    def encode(self, read: Any, residual: Any, out: Any) -> int:
        """Write the payload of `read` plus `residual`, which keeps what is not in it; return the payload's bytes."""
        try:
            return self.codec.encode(read, residual, out)
        except NonFiniteError as error:
            return self._refuse(read.size, str(error), out)

    def _refuse(self, numel: int, why: str, out: Any) -> int:
        """Write the payload of values that are not finite; return its bytes."""
        self.nonfinite.note(why)
        return self.codec.finish(out, numel, 0, NOT_FINITE)

    def decode(self, read: Any, out: Any) -> None:
        """Write the values of the payload that `read` begins with."""
        self.codec.decode(self._payload(read), out)

    adds_scaled = True  # `decode_add` and its bound form take a factor

    def decode_add(self, read: Any, out: Any, factor: float = 1.0) -> None:
        """Add `factor` times the values of the payload that `read` begins with."""
        self.codec.decode_add(self._payload(read), out, factor)

    def bound_encode(self, read: Any, residual: Any, out: Any) -> Bound | None:
        """Return an `encode` of memory that stays, None where only the usual way will do."""
        return bound_encode(self.codec, self.encode, read, residual, out)

    def bound_decode(self, read: Any, out: Any, adds: bool, factor: float = 1.0) -> Bound | None:
        """Return the same of `decode` or `decode_add`."""
        return bound_decode(self.codec, self.decode_add if adds else self.decode, read, out, adds, factor)

    def bound_encode_into(self, read: Any, residual: Any) -> EncodeInto | None:
        """Return an `encode` of memory that stays, for payloads that differ in size and thus in place."""
        return bound_encode_into(self.codec, partial(self._refuse, read.size, not_finite()), read, residual)

    def bound_decode_from(self, out: Any, adds: bool) -> DecodeFrom | None:
        """Return the same of `decode` or `decode_add`."""
        return bound_decode_from(self.codec, self.decode_add if adds else self.decode, out, adds)

    def on_device(self, device: Any, note: Callable[[], None] | None = None) -> Any:
        """Return the codec's form on a device, None where it has none: without Triton, and where it may skip a step.

        `note` is told of values that are not finite, instead of `check`.
        """
        if self.codec.on_nonfinite == "skip" or find_spec("triton") is None:
            return None
        from penstock.codecs.dense.wire_device import make_form

        if note is not None:
            return make_form(self.codec.on(device), note)
        if device not in self._forms:
            self._forms[device] = make_form(self.codec.on(device), self.nonfinite.note)
        return self._forms[device]

    def note_nonfinite(self) -> None:
        """Note that what was decoded elsewhere, and came here dense, is not finite."""
        self.nonfinite.note()

    def check(self) -> None:
        """Raise if a payload since the last check was of values that are not finite, and the codec is to raise."""
        if (why := self.nonfinite.take()) and self.codec.on_nonfinite == "raise":
            raise NonFiniteError(why)

    def _payload(self, read: Any) -> Any:
        self.nonfinite.note_payload(read)
        return read[: self.payload_nbytes(read)]


@dataclass(frozen=True, slots=True)
class WireSparse:
    """The same of a sparse codec, whose blocks are added without decoding them."""

    codec: "SparseCodec | PublishedCodec"
    nonfinite: Nonfinite = field(default_factory=Nonfinite, repr=False)

    @property
    def name(self) -> str:
        """The codec and its settings."""
        return self.codec.name

    @property
    def puts_off(self) -> bool:
        """Whether the residual is to be a `PutOff`."""
        return self.codec.puts_off

    def max_nbytes(self, numel: int) -> int:
        """Return how many bytes `numel` elements can need at most."""
        return self.codec.max_nbytes(numel)

    def encode(self, read: Any, residual: Any, out: Any) -> int:
        """Write the block of `read` plus `residual`; return its bytes."""
        try:
            return self.codec.encode(read, residual, out)
        except NonFiniteError as error:
            return self._refuse(read.size, str(error), out)

    def bound_encode(self, read: Any, residual: Any, out: Any) -> Bound | None:
        """Return an `encode` of memory that stays, None where only the usual way will do."""
        bound = self.codec.bound_encode(read, residual, out)
        return bound and partial(self._encode_bound, bound, read.size, out)

    def _encode_bound(self, bound: Callable[[], None], numel: int, out: Any) -> None:
        try:
            bound()
        except NonFiniteError as error:
            self._refuse(numel, str(error), out)

    def _refuse(self, numel: int, why: str, out: Any) -> int:
        """Write the block of values that are not finite; a residual they were added to is of no use any more."""
        self.nonfinite.note(why)
        return self.codec.refuse(numel, out)

    def decode(self, read: Any, out: Any) -> None:
        """Write the values of a block."""
        self.nonfinite.note_payload(read)
        self.codec.decode(read, out)

    def decode_add(self, read: Any, out: Any) -> None:
        """Add the values of a block."""
        self.nonfinite.note_payload(read)
        self.codec.decode_add(read, out)

    def merge(self, read: Any, write: Any, residual: Any) -> None:
        """Add a block to another; what falls out is added to the residual."""
        self.codec.merge(read, write, residual)

    def on_device(self, device: Any, note: Callable[[], None] | None = None) -> Any:
        """Return the codec's form on a device, None where it has none; `note` as that of a `WireCodec`."""
        return self.codec.on_device(device, note or self.nonfinite.note)

    def note_nonfinite(self) -> None:
        """Note that what was decoded elsewhere, and came here dense, is not finite."""
        self.nonfinite.note()

    def check(self) -> None:
        """Raise if a block since the last check was of values that are not finite, and the codec is to raise."""
        if (why := self.nonfinite.take()) and self.codec.on_nonfinite == "raise":
            raise NonFiniteError(why)
