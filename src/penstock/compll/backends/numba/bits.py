"""Scalars in generated numba kernels: bits of floats, an order without special cases, exact casts and division."""

# mypy: disable-error-code="call-arg,call-overload,arg-type,var-annotated"
# numba's types are called as functions inside compiled code, which its annotations do not know.
from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, int32, int64, njit, types, uint8, uint16, uint64
from numba.extending import intrinsic

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
