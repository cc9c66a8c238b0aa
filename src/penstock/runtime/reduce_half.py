"""`out += other` of float16 and bfloat16, compiled by numba and run without the interpreter lock.

They are added in float32 and rounded to nearest even, NaN kept; numba has arithmetic for neither on CPUs, so both are
one LLVM expression on the elements' 16 bits, which vectorises as float32 does. Imported only where such elements are
merged: numba and LLVM take a hundred megabytes.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from penstock.private_folder import compiled
from penstock.runtime.transport import Array

Merge = Callable[[Array, Array], None]

_I16, _I32, _HALF, _FLOAT = ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()


@cache
def compiled_merge(dtype: str) -> Merge:
    """Return the compiled `merge(out, other)` of `float16` or `bfloat16`, on their bits."""
    kernel: Merge = compiled(_FUNCTIONS[dtype])
    return kernel


def _add_float16(out: Array, other: Array) -> None:
    for i in range(out.size):
        out[i] = _half_sum(out[i], other[i])


def _add_bfloat16(out: Array, other: Array) -> None:
    for i in range(out.size):
        out[i] = _bfloat_sum(out[i], other[i])


_FUNCTIONS = {"float16": _add_float16, "bfloat16": _add_bfloat16}


def _sum_of_bits(emit: Callable[[Any, Any, Any], Any]) -> Any:
    """Return a function of two 16-bit numbers that numba replaces by the instructions `emit` writes."""

    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return emit(builder, *arguments)

    def signature(_typing: Any, _left: Any, _right: Any) -> Any:
        return types.uint16(types.uint16, types.uint16), codegen

    return intrinsic(signature)


def _emit_half_sum(builder: Any, left: Any, right: Any) -> Any:
    terms = [builder.fpext(builder.bitcast(term, _HALF), _FLOAT) for term in (left, right)]
    return builder.bitcast(builder.fptrunc(builder.fadd(*terms), _HALF), _I16)


def _emit_bfloat_sum(builder: Any, left: Any, right: Any) -> Any:
    """A bfloat16 is the upper half of a float32: widen by shifting, add, round the lower half away.

    Adding 0x7fff plus the last kept bit carries into the upper half exactly when nearest-even rounds up; NaN is
    set aside because that carry could turn it into infinity.
    """
    sixteen = _I32(16)
    terms = [builder.bitcast(builder.shl(builder.zext(term, _I32), sixteen), _FLOAT) for term in (left, right)]
    total = builder.fadd(*terms)
    word = builder.bitcast(total, _I32)
    upper = builder.lshr(word, sixteen)
    rounded = builder.lshr(builder.add(word, builder.add(builder.and_(upper, _I32(1)), _I32(0x7FFF))), sixteen)
    quiet = builder.or_(upper, _I32(0x40))
    is_nan = builder.fcmp_unordered("uno", total, total)
    return builder.trunc(builder.select(is_nan, quiet, rounded), _I16)


_half_sum = _sum_of_bits(_emit_half_sum)
_bfloat_sum = _sum_of_bits(_emit_bfloat_sum)
