"""The payload in generated numba kernels: codes of a few bits packed into bytes, and scalars at any byte."""

# mypy: disable-error-code="call-arg,call-overload,arg-type,var-annotated"
# numba's types are called as functions inside compiled code, which its annotations do not know.
from typing import Any

import numpy as np
from numba import int32, uint8, uint16, uint32

from penstock.compll.backends.numba.bits import bits_float, float_bits, helper

_MAGIC = np.uint64(0x0102040810204080)  # brings bit 8j of a word to bit 56 + j
_TOP = np.uint64(56)


@helper
def pack1(codes: Any, size: Any, out: Any) -> None:
    """Eight one-bit codes to a byte, the first in bit 0."""
    for i in range(size, (size + 7) // 8 * 8):
        codes[i] = 0
    words = codes.view(np.uint64)
    for i in range((size + 7) // 8):
        out[i] = uint8((words[i] * _MAGIC) >> _TOP)


@helper
def pack2(codes: Any, size: Any, out: Any) -> None:
    """Four two-bit codes to a byte, the first in bits 0-1."""
    for i in range(size, (size + 3) // 4 * 4):
        codes[i] = 0
    for i in range((size + 3) // 4):
        byte = uint8(0)
        for j in range(4):
            byte |= codes[4 * i + j] << (2 * j)
        out[i] = byte


@helper
def pack4(codes: Any, size: Any, out: Any) -> None:
    """Two four-bit codes to a byte, the first in bits 0-3."""
    if size % 2:
        codes[size] = 0
    for i in range((size + 1) // 2):
        out[i] = codes[2 * i] | codes[2 * i + 1] << 4


@helper
def unpack1(packed: Any, size: Any, codes: Any) -> None:
    """What `pack1` packed."""
    for i in range((size + 7) // 8):
        for j in range(8):
            codes[8 * i + j] = (packed[i] >> j) & 1


@helper
def unpack2(packed: Any, size: Any, codes: Any) -> None:
    """What `pack2` packed."""
    for i in range((size + 3) // 4):
        for j in range(4):
            codes[4 * i + j] = (packed[i] >> (2 * j)) & 3


@helper
def unpack4(packed: Any, size: Any, codes: Any) -> None:
    """What `pack4` packed."""
    for i in range((size + 1) // 2):
        codes[2 * i] = packed[i] & 15
        codes[2 * i + 1] = packed[i] >> 4


@helper
def copy_bytes(source: Any, nbytes: Any, out: Any) -> None:
    """Bytes to any address: how values of a byte and more are packed and unpacked."""
    for i in range(nbytes):
        out[i] = source[i]


@helper
def load_uint8(payload: Any, offset: Any) -> Any:
    """One byte."""
    return payload[offset]


@helper
def load_uint16(payload: Any, offset: Any) -> Any:
    """Two bytes, the low one first."""
    return uint16(uint16(payload[offset]) | uint16(payload[offset + 1]) << uint16(8))


@helper
def load_int32(payload: Any, offset: Any) -> Any:
    """Four bytes, the lowest first."""
    word = uint32(0)
    for i in range(4):
        word |= uint32(uint32(payload[offset + i]) << uint32(8 * i))
    return int32(word)


@helper
def load_float32(payload: Any, offset: Any) -> Any:
    """Four bytes, the lowest first."""
    return bits_float(load_int32(payload, offset))


@helper
def store_uint8(out: Any, offset: Any, value: Any) -> None:
    """One byte."""
    out[offset] = value


@helper
def store_uint16(out: Any, offset: Any, value: Any) -> None:
    """Two bytes, the low one first."""
    out[offset] = uint8(value)
    out[offset + 1] = uint8(value >> 8)


@helper
def store_int32(out: Any, offset: Any, value: Any) -> None:
    """Four bytes, the lowest first."""
    for i in range(4):
        out[offset + i] = uint8(uint32(value) >> uint32(8 * i))


@helper
def store_float32(out: Any, offset: Any, value: Any) -> None:
    """Four bytes, the lowest first."""
    store_int32(out, offset, float_bits(value))
