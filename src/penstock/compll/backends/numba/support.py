"""Functions that generated numba kernels call; each kernel's module begins with `from ...support import *`.

Bits of floats and exact casts, packing of small codes into bytes, scalars at any byte, random numbers (`philox.py`).

Every helper is compiled into its caller. Their loops are written so that LLVM turns them into vector instructions:
known trip counts inside, no calls, 32-bit arithmetic. Only `add` may be reordered: fast-math flags sit on single
instructions, so allowing it there lets a sum run in vector lanes and changes no bit anywhere else.
"""

# mypy: disable-error-code="call-arg,call-overload,arg-type,var-annotated,attr-defined,no-untyped-call"
# numba's types are called as functions inside compiled code, which its annotations do not know.

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, float32, int32, int64, njit, types, uint8, uint16, uint32, uint64
from numba.extending import intrinsic

from penstock.compll.philox import philox4x32
from penstock.compll.select import _kth_key as kth_key  # noqa: F401
from penstock.compll.select import _select as select_largest  # noqa: F401

NONFINITE = -1  # what encode returns for NaN or infinity
DAMAGED = -1  # what decode returns for bytes that encode cannot have written
ONE = np.uint64(1)


INFINITY_BITS = np.int32(0x7F800000)
MAGNITUDE = np.int32(0x7FFFFFFF)

helper = njit(error_model="numpy", nogil=True)


@intrinsic
def float_bits(typingctx: Any, x: Any) -> Any:
    """The bit pattern of a float32 as int32."""
    return int32(float32), lambda context, builder, signature, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def bits_float(typingctx: Any, x: Any) -> Any:
    """The float32 with an int32's bit pattern."""
    return float32(int32), lambda context, builder, signature, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def lowest_bit(typingctx: Any, x: Any) -> Any:
    """The number of the lowest bit of a uint64 that is set."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return int64(uint64), generate


@intrinsic
def half_bits(typingctx: Any, x: Any) -> Any:
    """The bit pattern of the nearest float16, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return uint16(float32), generate


@intrinsic
def half_value(typingctx: Any, x: Any) -> Any:
    """The float16 with a uint16's bit pattern, as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return float32(types.uint16), generate


def _pointer(type_: Any) -> Any:
    """Return what makes a pointer to elements of a type from an address."""

    @intrinsic
    def pointer(typingctx: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(type_)(int64), generate

    return pointer


_float_pointer, _byte_pointer = _pointer(float32), _pointer(uint8)


@helper
def floats_at(address: Any, size: Any) -> Any:
    """The float32 numbers at an address: the caller sees to it that so many are there."""
    return carray(_float_pointer(address), size)


@helper
def bytes_at(address: Any, size: Any) -> Any:
    """The bytes at an address: the caller sees to it that so many are there."""
    return carray(_byte_pointer(address), size)


@helper
def same_bytes(one: Any, other: Any) -> Any:
    """Whether two arrays of one size hold the same bytes."""
    for i in range(one.size):  # noqa: SIM110  # compiled
        if one[i] != other[i]:
            return False
    return True


@njit(fastmath={"reassoc", "nsz"})
def add(total: Any, value: Any) -> Any:
    """A sum whose order is free."""
    return total + value


@helper
def order_key(x: Any) -> Any:
    """An int32 that sorts as the float does: minima and maxima of integers need no special case for NaN or -0."""
    bits = float_bits(x)
    return int32(bits ^ (int32(bits >> int32(31)) & MAGNITUDE))


@helper
def key_value(key: Any, size: Any) -> Any:
    """The float of an `order_key`, -0 as +0; 0 where nothing was compared."""
    if size == 0:
        return float32(0)
    return bits_float(int32(key ^ (int32(key >> int32(31)) & MAGNITUDE))) + float32(0)


@helper
def block_size(start: Any, stop: Any, block: Any) -> Any:
    """Elements of the block that begins at `start`."""
    return block if stop - start > block else stop - start


@helper
def is_finite(x: Any) -> Any:
    """Whether a float is neither NaN nor infinite."""
    return (float_bits(x) & MAGNITUDE) < INFINITY_BITS


@helper
def to_uint8(x: Any, top: Any) -> Any:
    """A float cut towards zero and held in 0..top; NaN is 0."""
    held = x if x > float32(0) else float32(0)
    return uint8(int32(held if held < top else top))


@helper
def to_uint16(x: Any, top: Any) -> Any:
    """A float cut towards zero and held in 0..top; NaN is 0."""
    held = x if x > float32(0) else float32(0)
    return uint16(int32(held if held < top else top))


@helper
def to_int32(x: Any) -> Any:
    """A float cut towards zero and held in the range of int32; NaN is 0."""
    number = x if x == x else float32(0)
    held = number if number > float32(-2147483648.0) else float32(-2147483648.0)
    return int32(held if held < float32(2147483520.0) else float32(2147483520.0))


@helper
def cut_div(a: Any, b: Any) -> Any:
    """The quotient of two int32 cut towards zero."""
    quotient = int64(abs(int64(a))) // int64(abs(int64(b)))
    return int32(quotient if (a < 0) == (b < 0) else -quotient)


@helper
def cut_mod(a: Any, b: Any) -> Any:
    """What `cut_div` leaves."""
    return int32(int64(a) - int64(cut_div(a, b)) * int64(b))


@helper
def read_at(vector: Any, index: Any, zero: Any) -> Any:
    """`vector[index]`, the index held inside; `zero` from an empty vector."""
    if vector.size == 0:
        return zero
    last = vector.size - 1
    inside = index if index < last else last
    return vector[inside if inside > 0 else 0]


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


_SHIFT = np.uint32(8)
_SCALE = np.float32(2.0**-24)
_WORD = np.uint64(32)
_philox = njit(inline="always")(philox4x32)


@njit(nogil=True)
def fill_words(words: Any, size: Any, seed_low: Any, seed_high: Any, stream: Any, start: Any) -> None:
    """The random words of elements start .. start + size - 1; `start` is a multiple of 4, and so is the room."""
    first = uint64(start // 4)
    high, low = uint32(first >> _WORD), uint32(first)  # a block does not cross a multiple of 2^34 elements
    for i in range((size + 3) // 4):
        a, b, c, d = _philox(uint32(low + uint32(i)), high, uint32(stream), uint32(0), seed_low, seed_high)
        words[4 * i] = a
        words[4 * i + 1] = b
        words[4 * i + 2] = c
        words[4 * i + 3] = d


@njit(nogil=True)
def fill_uniform(numbers: Any, size: Any, seed_low: Any, seed_high: Any, stream: Any, start: Any) -> None:
    """The uniform numbers in [0, 1) of the same elements."""
    first = uint64(start // 4)
    high, low = uint32(first >> _WORD), uint32(first)
    for i in range((size + 3) // 4):
        a, b, c, d = _philox(uint32(low + uint32(i)), high, uint32(stream), uint32(0), seed_low, seed_high)
        numbers[4 * i] = float32(int32(a >> _SHIFT)) * _SCALE
        numbers[4 * i + 1] = float32(int32(b >> _SHIFT)) * _SCALE
        numbers[4 * i + 2] = float32(int32(c >> _SHIFT)) * _SCALE
        numbers[4 * i + 3] = float32(int32(d >> _SHIFT)) * _SCALE


@helper
def random_int32(word: Any, low: Any, high: Any) -> Any:
    """A random integer in [low, high) from a random word."""
    span = uint64(int64(high) - int64(low))
    return int32(int64(low) + int64((uint64(word) * span) >> _WORD))


@helper
def first_word(seed_low: Any, seed_high: Any, stream: Any) -> Any:
    """The random word of element 0."""
    return _philox(uint32(0), uint32(0), uint32(stream), uint32(0), seed_low, seed_high)[0]


@helper
def first_uniform(seed_low: Any, seed_high: Any, stream: Any) -> Any:
    """The uniform number of element 0."""
    return float32(int32(first_word(seed_low, seed_high, stream) >> _SHIFT)) * _SCALE
