"""Operations of the IR on numpy arrays: each rounds to single precision, wraps or cuts as `ir.py` says."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.compll.types import BOOL, Kind, Scalar

Array = NDArray[Any]

ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "land": np.logical_and,
    "lor": np.logical_or,
    "not": np.logical_not,
    "select": np.where,
    "mod": np.fmod,
}


def divide_integers(left: Any, right: Any) -> Any:
    """Return the quotient cut towards zero, as C does."""
    a, b = np.asarray(left, np.int64), np.asarray(right, np.int64)
    return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(np.int32)


def read_at(vector: Array, index: Any, dtype: np.dtype[Any]) -> Any:
    """Return `vector[index]`, the index held inside; 0 from an empty vector."""
    if vector.size == 0:
        return np.zeros(np.shape(index), dtype)
    return vector[np.clip(index, 0, vector.size - 1)]


def cast(value: Any, source: Scalar, target: Scalar) -> Any:
    """Return a value as another type: a float cut towards zero and held in range, NaN as 0; an integer its low bits."""
    dtype = np.dtype(target.storage)
    if source.is_float and not target.is_float:
        top = np.float32(min(target.high, 2147483520))  # the largest float below 2^31
        held = np.where(value > np.float32(target.low), value, np.where(np.isnan(value), 0, np.float32(target.low)))
        return np.where(held < top, held, top).astype(dtype)
    if target.kind is Kind.UINT and source is not BOOL:
        return (np.asarray(value).astype(np.int64) & target.high).astype(dtype)
    return np.asarray(value).astype(dtype)


def reduce_values(values: Array, reducer: str) -> Any:
    """Return the smallest, the greatest or the sum of a vector that is not empty."""
    if reducer == "sum":
        return np.float32(values.sum(dtype=np.float64)) if values.dtype == np.float32 else values.sum(dtype=np.int32)
    found = values.min() if reducer == "smaller" else values.max()
    return found + values.dtype.type(0)  # -0 becomes +0


def group_reduce(values: Array, reducer: str, group: int) -> Array:
    """Return one reduction per `group` neighbours."""
    if values.size == 0:
        return values
    starts = np.arange(0, values.size, group)
    if reducer == "sum":
        wide = np.float64 if values.dtype == np.float32 else values.dtype
        return np.add.reduceat(values.astype(wide), starts).astype(values.dtype)
    reduced = (np.minimum if reducer == "smaller" else np.maximum).reduceat(values, starts)
    return np.asarray(reduced + values.dtype.type(0))
