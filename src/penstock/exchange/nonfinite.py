"""A codec as one exchange uses it: told which iteration it is, and asked afterwards whether all values were finite.

A gradient that is not finite is sent as such: its payload decodes to NaN (`codecs.wire`). So every rank sees it at the
same bucket and can raise, or skip the step, together with the others.
"""

from typing import Any

from penstock.codecs.wire import WireCodec, WireSparse, wire_codec

ENCODES_BITS = 16  # of the counter of encodes, that count within an iteration; the others count iterations


def watched_codec(spec: str, seed: int) -> "Watched":
    """Return the codec that a plan writes as `spec`; `seed` differs between ranks."""
    codec = wire_codec(spec, seed)
    if isinstance(codec, WireSparse):
        return WatchedMerging(codec)
    return WatchedVarying(codec) if codec.varies else WatchedFixed(codec)


class Watched:
    """What the executor calls; remembers whether anything that was not finite went through."""

    takes_feedback = True  # else no residual is kept: it would grow
    adds_scaled = False

    def __init__(self, codec: WireCodec | WireSparse) -> None:
        self._codec = codec
        self._forms: dict[Any, Any] = {}  # on each device
        self.name, self.max_nbytes, self.puts_off = codec.name, codec.max_nbytes, codec.puts_off
        self.encode, self.decode, self.decode_add = codec.encode, codec.decode, codec.decode_add
        self.bound_encode, self.note_nonfinite = codec.bound_encode, codec.note_nonfinite
        self.hears_later = False  # of values that are not finite, from a device on which this rank is alone

    def begin(self, iteration: int) -> None:
        """Draw what this iteration always draws, so that a resumed run rounds as an unbroken one would."""

    def on_device(self, device: Any) -> Any:
        """Return the codec's form on a device; None where it has none there, as in host memory."""
        if device not in self._forms:
            self._forms[device] = self._codec.on_device(device) if device.type == "cuda" else None
        return self._forms[device]

    def check(self) -> None:
        """Raise nothing: the exchange asks `saw_nonfinite`, and knows which parameters are meant."""

    def saw_nonfinite(self) -> bool:
        """Say whether anything was not finite since the last time this was asked."""
        return bool(self._codec.nonfinite.take())


class WatchedFixed(Watched):
    """A codec of the language whose payloads of as many elements have one size."""

    _codec: WireCodec

    def __init__(self, codec: WireCodec) -> None:
        super().__init__(codec)
        self.fingerprint = codec.fingerprint
        self.takes_feedback, self.adds_scaled = codec.takes_feedback, codec.adds_scaled
        self.bound_decode = codec.bound_decode

    def begin(self, iteration: int) -> None:
        """Draw what this iteration always draws, so that a resumed run rounds as an unbroken one would."""
        self._codec.codec.count_from(iteration << ENCODES_BITS)


class WatchedVarying(WatchedFixed):
    """The same for one whose payloads differ in size."""

    varies = True

    def __init__(self, codec: WireCodec) -> None:
        super().__init__(codec)
        self.bound_encode_into, self.bound_decode_from = codec.bound_encode_into, codec.bound_decode_from
        self.payload_nbytes = codec.payload_nbytes


class WatchedMerging(Watched):
    """The same for a sparse codec, whose blocks are added without decoding them."""

    _codec: WireSparse

    def __init__(self, codec: WireSparse) -> None:
        super().__init__(codec)
        self.merge = codec.merge
