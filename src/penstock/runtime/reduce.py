"""`out += other` for every element type, run without the interpreter lock.

One thread each: the cores belong to the training step. What numpy adds, numpy adds: it is as fast as a compiled loop,
and a training process need not hold a compiler for it. float16, where numpy is slow, and bfloat16, which it has not,
have kernels of their own (`reduce_half.py`).
"""

from collections.abc import Callable

import numpy as np

from penstock.runtime.transport import Array
from penstock.runtime.views import storage_dtype

Merge = Callable[[Array, Array], None]
COMPILED = ("float16", "bfloat16")


def merge_kernel(dtype: str) -> Merge:
    """Return the `merge(out, other)` of an element type, ready to run at full speed.

    It has run once when this returns, so that no later call pays for compiling it or for reading it from disk.
    Arrays of float16 are passed as their bits (`bits`), as those of bfloat16 always are.
    """
    storage = storage_dtype(dtype)
    kernel = _compiled(dtype) if dtype in COMPILED else _add
    kernel(*(bits(np.zeros(1, storage), dtype) for _ in range(2)))
    return kernel


def bits(values: Array, dtype: str) -> Array:
    """Return the array as its merge kernel wants it: float16 as uint16, everything else unchanged."""
    return values.view(np.uint16) if dtype == "float16" else values


def _add(out: Array, other: Array) -> None:
    with np.errstate(all="ignore"):  # infinities and NaN are the training loop's to judge, as with any all-reduce
        np.add(out, other, out=out)


def _compiled(dtype: str) -> Merge:
    from penstock.runtime.reduce_half import compiled_merge

    return compiled_merge(dtype)
