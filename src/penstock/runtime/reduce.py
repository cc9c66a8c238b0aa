"""`out += other` for every element type, compiled by numba and run without the interpreter lock.

One thread each: the cores belong to the training step, and numba's own threads may not be called from several of
ours. float16 and bfloat16 are added in float32 and rounded to nearest even, NaN kept; numba has arithmetic for
neither on CPUs, so both are one LLVM expression on the elements' 16 bits, which vectorises as float32 does.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from penstock.runtime.dtypes import storage_dtype
from penstock.runtime.transport import Array

Merge = Callable[[Array, Array], None]

_I16, _I32, _HALF, _FLOAT = ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()


def merge_kernel(dtype: str) -> Merge:
    """Return the compiled `merge(out, other)` of an element type, ready to run at full speed.

    It has run once when this returns, so that no later call pays for compiling it or for reading it from disk.
    Arrays of float16 are passed as their bits (`bits`), as those of bfloat16 always are.
    """
    kernel = _compile(_FUNCTIONS.get(dtype, _add))
    kernel(*(bits(np.zeros(1, storage_dtype(dtype)), dtype) for _ in range(2)))
    return kernel


def bits(values: Array, dtype: str) -> Array:
    """Return the array as its merge kernel wants it: float16 as uint16, everything else unchanged."""
    return values.view(np.uint16) if dtype == "float16" else values


def _add(out: Array, other: Array) -> None:
    for i in range(out.size):
        out[i] += other[i]


def _add_float16(out: Array, other: Array) -> None:
    for i in range(out.size):
        out[i] = _half_sum(out[i], other[i])


def _add_bfloat16(out: Array, other: Array) -> None:
    for i in range(out.size):
        out[i] = _bfloat_sum(out[i], other[i])


_FUNCTIONS = {"float16": _add_float16, "bfloat16": _add_bfloat16}


@cache
def _compile(function: Merge) -> Merge:
    try:
        kernel: Merge = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # nowhere to write a cache: neither beside this file nor in the user's directory
        kernel = numba.njit(nogil=True)(function)
    return kernel


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
