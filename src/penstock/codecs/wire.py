"""A codec as the executor of programs calls it: views of its memory, and buffers of the largest size.

Both sides of a message reserve `max_nbytes`, and the payload is the beginning of it; the header says how much.
"""

from dataclasses import dataclass
from typing import Any

from penstock.codecs.codec import Codec


@dataclass(frozen=True, slots=True)
class WireCodec:
    """What `runtime.codec.Codec` asks for."""

    codec: Codec

    @property
    def name(self) -> str:
        """The codec and its settings."""
        return self.codec.name

    def max_nbytes(self, numel: int) -> int:
        """Return how many bytes `numel` elements can need at most."""
        return self.codec.max_nbytes(numel)

    def encode(self, read: Any, residual: Any, out: Any) -> int:
        """Write the payload of `read` plus `residual`, which keeps what is not in it; return the payload's bytes."""
        return self.codec.encode(read, residual, out)

    def decode(self, read: Any, out: Any) -> None:
        """Write the values of the payload that `read` begins with."""
        self.codec.decode(read[: self.codec.payload_nbytes(read)], out)

    def decode_add(self, read: Any, out: Any) -> None:
        """Add the values of the payload that `read` begins with."""
        self.codec.decode_add(read[: self.codec.payload_nbytes(read)], out)
