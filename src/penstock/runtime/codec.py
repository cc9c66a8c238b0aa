"""What the executor asks of a compressor; `penstock.codecs` has the real ones."""

from typing import Protocol

from penstock.runtime.transport import Array, Bytes


class Codec(Protocol):
    """Turns elements into bytes and back. Both sides of a message reserve and send `max_nbytes` for it.

    Methods get views of memory that is reused: they must not keep them, and should not allocate.
    """

    @property
    def name(self) -> str:
        """What ranks compare before data move: the codec and its settings."""

    def max_nbytes(self, numel: int) -> int:
        """Return how many bytes `numel` elements can need at most."""

    def encode(self, read: Array, residual: Array | None, out: Bytes) -> int:
        """Write the encoded form of `read` and return how many bytes it took.

        `residual`, float32 and as large as `read`, is added first and left holding what was not sent.
        """

    def decode(self, read: Bytes, out: Array) -> None:
        """Write the values of an encoded block."""

    def decode_add(self, read: Bytes, out: Array) -> None:
        """Add the values of an encoded block."""


class Merging(Codec, Protocol):
    """A codec whose encoded blocks can be added without decoding them, as sparse ones can."""

    def merge(self, read: Bytes, write: Bytes, residual: Array | None) -> None:
        """Add an encoded block to another, in place; what does not fit any more is added to `residual`."""
