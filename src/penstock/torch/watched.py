"""A codec that lets NaN and infinity through to everybody, instead of stopping one rank while the others wait.

A gradient that is not finite is sent as such: its payload decodes to NaN. So every rank sees it at the same bucket and
can raise, or skip the step, together with the others.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.codecs.wire import WireCodec, wire_codec
from penstock.errors import NonFiniteError
from penstock.runtime.codec import Codec, Varying
from penstock.runtime.transport import Array, Bytes

if TYPE_CHECKING:  # their kernels are compiled: dense training does without
    from penstock.codecs.published import PublishedCodec
    from penstock.codecs.sparse import SparseCodec

ENCODES_BITS = 16  # of the counter of encodes, that count within an iteration; the others count iterations


def watched_codec(spec: str, seed: int) -> "Watched":
    """Return the codec that a plan writes as `spec`; `seed` differs between ranks."""
    codec = wire_codec(spec, seed)
    if isinstance(codec, WireCodec):
        kind = WatchedVarying if codec.varies else Watched
        return kind(codec, codec.codec.count_from, codec.takes_feedback)
    return WatchedMerging(codec)


class Watched:
    """What the executor calls; remembers whether anything that was not finite went through."""

    def __init__(
        self,
        codec: Codec,
        count_from: Callable[[int], None] = lambda number: None,
        takes_feedback: bool = True,
    ) -> None:
        self._codec, self._count_from = codec, count_from
        self._seen = False
        self._forms: dict[Any, Any] = {}  # on each device
        self.name, self.max_nbytes = codec.name, codec.max_nbytes
        self.takes_feedback = takes_feedback  # else no residual is kept: it would grow
        self.puts_off: bool = getattr(codec, "puts_off", False)
        self.adds_scaled: bool = getattr(codec, "adds_scaled", False)
        self.hears_later = False  # of values that are not finite, from a device on which this rank is alone

    def begin(self, iteration: int) -> None:
        """Draw what this iteration always draws, so that a resumed run rounds as an unbroken one would."""
        self._count_from(iteration << ENCODES_BITS)

    def encode(self, read: Array, residual: Array | None, out: Bytes) -> int:
        """Write the payload of `read`."""
        return self._codec.encode(read, residual, out)

    def decode(self, read: Bytes, out: Array) -> None:
        """Write the values of a payload."""
        self._codec.decode(read, out)
        self._look(out)

    def decode_add(self, read: Bytes, out: Array, *factor: float) -> None:
        """Add the values of a payload, times a factor where the codec `adds_scaled`."""
        self._codec.decode_add(read, out, *factor)
        self._look(out)

    def bound_encode(self, read: Array, residual: Any, out: Bytes) -> Any:
        """Return an `encode` of memory that stays, None where only the usual way will do."""
        make = getattr(self._codec, "bound_encode", None)
        return make and make(read, residual, out, self.encode)

    def bound_decode(self, read: Bytes, out: Array, adds: bool, factor: float = 1.0) -> Any:
        """Return the same of `decode` or `decode_add`; a payload that goes the quick way is finite."""
        make = getattr(self._codec, "bound_decode", None)
        return make and make(read, out, adds, factor, self.decode_add if adds else self.decode)

    def on_device(self, device: Any) -> Any:
        """Return the codec's form on a device; None where it has none there, as in host memory."""
        if device not in self._forms:
            form = getattr(self._codec, "on_device", None)
            self._forms[device] = form(device, self._note) if form and device.type == "cuda" else None
        return self._forms[device]

    def _note(self) -> None:
        self._seen = True

    def saw_nonfinite(self) -> bool:
        """Say whether anything was not finite since the last time this was asked."""
        seen, self._seen = self._seen, False
        return seen

    def _look(self, out: Any) -> None:
        """Look at one value: a payload that is not finite makes NaN of all."""
        if out.size and np.isnan(out[0]):
            self._seen = True


class WatchedVarying(Watched):
    """The same for a codec whose payloads differ in size."""

    _codec: Varying
    varies = True

    def bound_encode_into(self, read: Array, residual: Any) -> Any:
        """Return an `encode` of values that stay; None where only the usual way will do."""
        make = getattr(self._codec, "bound_encode_into", None)
        return make and make(read, residual)

    def bound_decode_from(self, out: Array, adds: bool) -> Any:
        """Return the same of `decode` or `decode_add`; a payload that goes the quick way is finite."""
        make = getattr(self._codec, "bound_decode_from", None)
        return make and make(out, adds, self.decode_add if adds else self.decode)

    def payload_nbytes(self, read: Bytes) -> int:
        """Return the bytes of the payload that `read` begins with."""
        return self._codec.payload_nbytes(read)


class WatchedMerging(Watched):
    """The same for a sparse codec, whose blocks are added without decoding them."""

    _codec: "SparseCodec | PublishedCodec"

    def encode(self, read: Array, residual: Array | None, out: Bytes) -> int:
        """Write the block of `read`; a residual is of no use any more once its gradient was not finite."""
        try:
            return self._codec.encode(read, residual, out)
        except NonFiniteError:
            self._seen = True
            return self._codec.refuse(read.size, out)

    def bound_encode(self, read: Array, residual: Any, out: Bytes) -> Any:
        """Return an `encode` of memory that stays, which says "not finite" in the block too."""
        make = getattr(self._codec, "bound_encode", None)
        bound = make and make(read, residual, out)
        return bound and partial(self._encode_or_refuse, bound, read.size, out)

    def _encode_or_refuse(self, bound: Callable[[], None], numel: int, out: Bytes) -> None:
        try:
            bound()
        except NonFiniteError:
            self._seen = True
            self._codec.refuse(numel, out)

    def merge(self, read: Bytes, write: Bytes, residual: Array | None) -> None:
        """Add an encoded block to another; what falls out goes to the residual."""
        self._codec.merge(read, write, residual)
