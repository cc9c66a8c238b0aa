"""Whole-vector operators: sort, topk, sample, scan, scatter; each with its meaning, and lowerings to both back ends.

`map`, `filter`, `reduce`, `random`, `concat` and `extract` are not here: they are the IR's own statements and fuse with
their neighbours. An operator of this table is a step of its own that reads vectors from memory and makes a new one.

A new one is registered by handing `compile_source` a larger table:

    reverse = Operator("reverse", 1, 0, numpy=lambda v: v[::-1].copy(),
                       numba="def reverse(v):\\n    return v[::-1].copy()\\n",
                       triton="def reverse(v):\\n    return v.flip(0)\\n")
    compile_source(text, operators=OPERATORS | {"reverse": reverse})

`numpy` is the meaning: it takes the vectors, then the scalars, then, if `draws`, the seed and the stream, and returns
an array of the result's storage type. `numba` is the source of one function of that name with the same arguments (the
seed as two uint32 words), compiled without the interpreter. `triton` is the source of one function of that name on
torch tensors: it may use torch and launch kernels, and must not wait for the device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.compll import philox
from penstock.compll.types import FLOAT, INT32, Scalar

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Operator:
    """A function of whole vectors."""

    name: str
    vectors: int
    scalars: int
    numpy: Callable[..., Array]
    numba: str
    triton: str
    passes: float = 1.0  # how often it reads its first vector
    result: Scalar | None = None  # element type; None: that of its last vector
    takes: Scalar | None = None  # element type its first vector must have; None: any
    scalar: Scalar = INT32  # what its scalars are brought to
    length: str = "same"  # as the first vector; "scalar": its last scalar; "upto": at most its last scalar
    draws: bool = False  # takes random numbers


def _sort(values: Array, descending: int) -> Array:
    ordered = np.sort(values)
    return ordered[::-1].copy() if descending else ordered


def _sort_by(keys: Array, values: Array, descending: int) -> Array:
    order = np.argsort(-keys if descending else keys, kind="stable")
    return np.ascontiguousarray(values[order])


def _topk(values: Array, k: int) -> Array:
    from penstock.compll.select import largest_magnitudes

    return largest_magnitudes(values, max(0, min(int(k), values.size)))


def _sample(values: Array, count: int, seed: int, stream: int) -> Array:
    """One element from each of `count` equal stretches, at random inside it."""
    count = max(0, min(int(count), values.size))
    edges = np.arange(count + 1, dtype=np.int64) * values.size // max(1, count)
    words = philox.words(seed, count, stream).astype(np.int64)
    return np.ascontiguousarray(values[edges[:-1] + (words * np.diff(edges) >> 32)])


def _scan(values: Array) -> Array:
    return np.cumsum(values, dtype=np.int32) if values.dtype != np.float32 else np.cumsum(values)


def _running(values: Array) -> Array:
    return np.maximum.accumulate(values)


def _scatter(indices: Array, values: Array, size: int) -> Array:
    out = np.zeros(int(size), values.dtype)
    out[indices] = values
    return out


_OPERATORS = (
    Operator("sort", 1, 1, _sort, "", ""),
    Operator("sort_by", 2, 1, _sort_by, "", ""),
    Operator("topk", 1, 1, _topk, "", "", result=INT32, takes=FLOAT, length="upto", passes=1.1),
    Operator("sample", 1, 1, _sample, "", "", length="upto", draws=True, passes=0.0),
    Operator("scan", 1, 0, _scan, "", "", takes=INT32, result=INT32),
    Operator("running", 1, 0, _running, "", "", takes=INT32, result=INT32),
    Operator("scatter", 2, 1, _scatter, "", "", takes=INT32, length="scalar", passes=0.0),
)
OPERATORS = {operator.name: operator for operator in _OPERATORS}
