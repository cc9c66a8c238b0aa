"""Whole-vector operators: sort, topk, sample, scan, scatter; each with its meaning, and lowerings to both back ends.

`map`, `filter`, `reduce`, `random`, `concat` and `extract` are not here: they are the IR's own statements and fuse with
their neighbours. An operator of this table is a step of its own that reads vectors from memory and makes a new one.

A new one is registered, for all compressors of this process:

    reverse = Operator("reverse", 1, 0, numpy=lambda v: v[::-1].copy(),
                       numba="def reverse(v):\\n    return v[::-1].copy()\\n",
                       triton="def reverse(v):\\n    return v.flip(0)\\n")
    register(reverse)

or handed to `compile_source` in a larger table, for one: `operators=OPERATORS | {"reverse": reverse}`.

`numpy` is the meaning: it takes the vectors, then the scalars, then, if `draws`, the seed and the stream, and returns
an array of the result's storage type. `numba` is the source of one function of that name with the same arguments (the
seed as two uint32 words), compiled without the interpreter. `triton` is the source of one function of that name on
torch tensors: it may use torch and launch kernels, and must not wait for the device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.compll import philox
from penstock.compll.functions import FUNCTIONS, Function
from penstock.compll.ir import Program, called
from penstock.compll.types import FLOAT, INT32, Scalar
from penstock.errors import CodecError

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
    length: str = "same"  # as the first vector; "scalar": its last scalar; "upto": at most its last scalar; "one": one
    draws: bool = False  # takes random numbers

    @property
    def text(self) -> str:
        """All that kernels depend on, as text: what it is written in, and what it takes and returns."""
        return "\n".join(str(getattr(self, each.name)) for each in fields(self) if each.name != "numpy")


def lowerings(program: Program, functions: Mapping[str, Function], operators: Mapping[str, Operator]) -> str:
    """Return the text of all functions and operators that a program calls: kernels are made from it."""
    names, whole = called(program)
    return "\n".join(
        [*(functions[name].text for name in sorted(names)), *(operators[name].text for name in sorted(whole))]
    )


def _sort(values: Array, descending: int) -> Array:
    ordered = np.sort(values)
    return ordered[::-1].copy() if descending else ordered


def _sort_by(keys: Array, values: Array, descending: int) -> Array:
    order = np.argsort(-keys if descending else keys, kind="stable")
    return np.ascontiguousarray(values[order])


def _nth(values: Array, index: int, descending: int) -> Array:
    """The element that a sorted vector has at `index`, held inside; none of an empty one."""
    if not values.size:
        return values
    place = max(0, min(int(index), values.size - 1))
    place = values.size - 1 - place if descending else place
    return np.asarray(np.partition(values, place)[place : place + 1] + values.dtype.type(0))


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
    if indices.size and not 0 <= indices.min() <= indices.max() < size:
        raise CodecError(f"an index is {indices.min()} or {indices.max()}; wanted 0 to {size - 1}: it is damaged")
    out = np.zeros(int(size), values.dtype)
    out[indices] = values
    return out


_NUMBA = {
    "sort": """def sort(values, descending):
    ordered = np.sort(values)
    return ordered[::-1].copy() if descending else ordered
""",
    "sort_by": """def sort_by(keys, values, descending):
    order = np.argsort(-keys if descending else keys, kind="mergesort")
    return values[order]
""",
    "nth": """def nth(values, index, descending):
    if values.size == 0:
        return np.empty(0, np.float32)
    place = max(0, min(int64(index), values.size - 1))
    keys = np.empty(values.size, np.int32)
    for i in range(values.size):
        keys[i] = order_key(values[i])
    found = np.empty(1, np.float32)
    found[0] = key_value(kth_key(keys, place + 1 if descending else values.size - place), 1)
    return found
""",
    "topk": """def topk(values, k):
    k = k if k < values.size else values.size
    indices = np.empty(k if k > 0 else 0, np.int32)
    if 0 < k < values.size:
        select_largest(values.view(np.int32), indices)
    else:
        for i in range(indices.size):
            indices[i] = i
    return indices
""",
    "sample": """def sample(values, count, seed_low, seed_high, stream):
    count = count if count < values.size else values.size
    count = int64(count if count > 0 else 0)
    words = np.empty(count + 3, np.uint32)
    fill_words(words, count, seed_low, seed_high, stream, 0)
    chosen = np.empty(count, values.dtype)
    for i in range(count):
        first, last = i * values.size // count, (i + 1) * values.size // count
        chosen[i] = values[first + (int64(words[i]) * (last - first) >> 32)]
    return chosen
""",
    "scan": """def scan(values):
    sums = np.empty(values.size, np.int32)
    total = int32(0)
    for i in range(values.size):
        total = int32(total + values[i])
        sums[i] = total
    return sums
""",
    "running": """def running(values):
    greatest = np.empty(values.size, np.int32)
    so_far = int32(-2147483648)
    for i in range(values.size):
        so_far = values[i] if values[i] > so_far else so_far
        greatest[i] = so_far
    return greatest
""",
    "scatter": """def scatter(indices, values, size):
    made = np.zeros(size, values.dtype)
    for i in range(indices.size):
        if indices[i] < 0 or indices[i] >= size:
            raise IndexError("an index is outside the vector")
        made[indices[i]] = values[i]
    return made
""",
}


def _operator(name: str, vectors: int, scalars: int, meaning: Callable[..., Array], **more: Any) -> Operator:
    return Operator(name, vectors, scalars, meaning, _NUMBA[name], "", **more)


_OPERATORS = (
    _operator("sort", 1, 1, _sort),
    _operator("sort_by", 2, 1, _sort_by),
    _operator("nth", 1, 2, _nth, takes=FLOAT, length="one"),
    _operator("topk", 1, 1, _topk, result=INT32, takes=FLOAT, length="upto", passes=1.1),
    _operator("sample", 1, 1, _sample, length="upto", draws=True, passes=0.0),
    _operator("scan", 1, 0, _scan, takes=INT32, result=INT32),
    _operator("running", 1, 0, _running, takes=INT32, result=INT32),
    _operator("scatter", 2, 1, _scatter, takes=INT32, length="scalar", passes=0.0),
)
OPERATORS = {operator.name: operator for operator in _OPERATORS}


def register(*added: Function | Operator) -> None:
    """Let all compressors of this process call these functions and operators, in training too.

    Every rank must do so before a codec is made that calls them: where the module is imported that every rank imports,
    such as the file of `penstock train --task`. Ranks compare the texts of what a codec calls before data moves.
    Registering the same text again does nothing; another one under a name that is taken is refused.
    """
    for one in added:
        if not one.name.isidentifier():
            raise CodecError(f"a function or operator called {one.name!r}; wanted a name such as reverse")
        known = FUNCTIONS.get(one.name) or OPERATORS.get(one.name)
        if known is not None and known.text != one.text:
            raise CodecError(f"{one.name!r} is registered with another text; wanted another name")
    for one in added:
        if isinstance(one, Operator):
            OPERATORS[one.name] = one
        else:
            FUNCTIONS[one.name] = one
