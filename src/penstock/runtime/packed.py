"""Blocks of payloads whose sizes are known only once they are there, for codecs that say they vary.

A block has room for the most its pieces can take. Its payloads stand one behind the other from its beginning, each at a
multiple of 16 bytes, and each says how long it is. So a message carries the beginning of its block, as far as that is
filled; the receive that it meets is as large as the block. Engines that take a message shorter than its receive say so
(`takes_shorter`: gloo, and ranks in one process); over others the whole block travels.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from penstock.runtime.codec_protocol import Varying
from penstock.runtime.layout import PAYLOAD_ALIGNMENT
from penstock.runtime.transport import Array, Bytes

Packed = Callable[[Bytes], int]  # encodes to, or decodes from, where its payload begins; returns the payload's bytes


def packed_encode(codec: Varying, values: Array, residual: Any) -> Packed:
    """Return an encode, by what the codec has for values that stay where there is such (`codecs.bound_packed`)."""
    make = getattr(codec, "bound_encode_into", None)
    return (make and make(values, residual)) or partial(codec.encode, values, residual)


def packed_decode(codec: Varying, values: Array, adds: bool) -> Packed:
    """Return a decode that writes or adds, likewise."""
    make = getattr(codec, "bound_decode_from", None)
    decode = codec.decode_add if adds else codec.decode

    def usual(payload: Bytes) -> int:
        decode(payload, values)
        return codec.payload_nbytes(payload)

    return (make and make(values, adds)) or usual


def encode_packed(encodes: Sequence[Packed], block: Bytes) -> None:
    """Write the payloads of some pieces."""
    place = 0
    for encode in encodes:
        place += _aligned(encode(block[place:]))


def decode_packed(decodes: Sequence[Packed], block: Bytes) -> None:
    """Write, or add, the values of the payloads in a block."""
    place = 0
    for decode in decodes:
        place += _aligned(decode(block[place:]))


def filled_nbytes(codec: Varying, count: int, block: Bytes) -> int:
    """Return how far a block of `count` payloads is filled, whether they were encoded here or arrived."""
    place = 0
    for _ in range(count):
        place += _aligned(codec.payload_nbytes(block[place:]))
    return min(place, block.size)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT
