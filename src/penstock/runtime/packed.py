"""Blocks of payloads whose sizes are known only once they are there, for codecs that say they vary.

A block has room for the most its pieces can take. Its payloads stand one behind the other from its beginning, each at a
multiple of 16 bytes, and each says how long it is. So a message carries the beginning of its block, as far as that is
filled; the receive that it meets is as large as the block. Engines that take a message shorter than its receive say so
(`takes_shorter`: gloo, and ranks in one process); over others the whole block travels.
"""

from collections.abc import Callable, Sequence
from typing import Any

from penstock.runtime.codec import Varying
from penstock.runtime.layout import PAYLOAD_ALIGNMENT
from penstock.runtime.transport import Array, Bytes


def encode_packed(codec: Varying, pieces: Sequence[tuple[Array, Any]], block: Bytes) -> None:
    """Write the payloads of some pieces, each given as its values and its residual."""
    place = 0
    for values, residual in pieces:
        place += _aligned(codec.encode(values, residual, block[place:]))


def decode_packed(
    decode: Callable[[Bytes, Array], None], codec: Varying, pieces: Sequence[Array], block: Bytes
) -> None:
    """Write, or add, the values of the payloads in a block."""
    place = 0
    for values in pieces:
        payload = block[place:]
        decode(payload, values)
        place += _aligned(codec.payload_nbytes(payload))


def filled_nbytes(codec: Varying, count: int, block: Bytes) -> int:
    """Return how far a block of `count` payloads is filled, whether they were encoded here or arrived."""
    place = 0
    for _ in range(count):
        place += _aligned(codec.payload_nbytes(block[place:]))
    return min(place, block.size)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT
