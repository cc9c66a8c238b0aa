"""What the executor asks of a compressor; `penstock.codecs` has the real ones."""

from typing import Protocol, runtime_checkable

from penstock.runtime.transport import Array, Bytes


class Codec(Protocol):
    """Turns elements into bytes and back. Both sides of a message reserve `max_nbytes` for it.

    All of it is sent, too, unless the codec is a `Varying` one.

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


@runtime_checkable
class Written(Protocol):
    """A codec that is made from a text, which may differ between hosts though the name does not."""

    @property
    def fingerprint(self) -> str:
        """Of the text, and of all else that the codec is made from: ranks compare it before data move."""


@runtime_checkable
class Reporting(Protocol):
    """A codec that does not raise for values that are not finite while others wait for this rank.

    Its payload says so instead, and is decoded to NaN, so that every rank learns of it in the same call.
    """

    def note_nonfinite(self) -> None:
        """Take note of NaN in what came to this rank decoded: in two levels, only a node's first rank decodes."""

    def check(self) -> None:
        """Raise what was noted since the last call, unless whoever uses the codec asks for it in another way."""


class Varying(Codec, Protocol):
    """A codec with a true `varies`: what it makes of so many elements differs in size (`runtime.packed`)."""

    def payload_nbytes(self, read: Bytes) -> int:
        """Return the bytes of the payload that `read` begins with."""


def fingerprint_of(codec: Codec | None) -> str:
    """Return what ranks compare of a codec beside its name; empty where its name says everything."""
    return codec.fingerprint if isinstance(codec, Written) else ""


class Merging(Codec, Protocol):
    """A codec whose encoded blocks can be added without decoding them, as sparse ones can."""

    def merge(self, read: Bytes, write: Bytes, residual: Array | None) -> None:
        """Add an encoded block to another, in place; what does not fit any more is added to `residual`."""
