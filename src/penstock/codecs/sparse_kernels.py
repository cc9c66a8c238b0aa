"""Kernels on sorted sparse vectors, compiled by numba and run without the interpreter lock.

A sparse vector is two arrays: strictly ascending indices (int32, or int64 where the tensor has 2^31 elements or more)
and their float32 values. All loops are one pass and run on one thread.
"""

# mypy: disable-error-code="untyped-decorator"
from typing import Any

import numba
import numpy as np


def _compile(function: Any) -> Any:
    return numba.njit(cache=True, nogil=True)(function)


@_compile
def gather(values: Any, indices: Any, out: Any) -> bool:
    """Copy the chosen values to `out`; say whether all are finite.

    The select puts NaN above infinity above every number, so what it chose has one of them if anything has.
    """
    finite = True
    for i in range(indices.size):
        out[i] = values[indices[i]]
        finite &= bool(np.isfinite(out[i]))
    return finite


@_compile
def subtract_at(values: Any, indices: Any, taken: Any) -> None:
    """Take values off at their indices."""
    for i in range(indices.size):
        values[indices[i]] -= taken[i]


@_compile
def add_at(values: Any, indices: Any, added: Any) -> None:
    """Add values at their indices."""
    for i in range(indices.size):
        values[indices[i]] += added[i]


@_compile
def put_at(values: Any, indices: Any, put: Any) -> None:
    """Replace the values at the indices."""
    for i in range(indices.size):
        values[indices[i]] = put[i]


@_compile
def ascending_below(indices: Any, numel: int) -> Any:
    """Say whether indices are strictly ascending, from 0 to less than `numel`."""
    good = True
    last = np.int64(-1)
    for i in range(indices.size):
        good &= indices[i] > last
        last = np.int64(indices[i])
    return good and last < numel


@_compile
def write_gaps(indices: Any, out: Any) -> int:
    """Write each index as its distance from the one before, less 1, in base 128, low digit first; return the bytes.

    The top bit of a byte says that another follows. The first index counts from -1.
    """
    place, last = 0, np.int64(-1)
    for i in range(indices.size):
        gap = np.int64(indices[i]) - last - 1
        last = np.int64(indices[i])
        while gap >= 128:
            out[place] = np.uint8(gap & 127 | 128)
            gap >>= 7
            place += 1
        out[place] = np.uint8(gap)
        place += 1
    return place


@_compile
def read_gaps(data: Any, numel: int, indices: Any) -> Any:
    """Read what `write_gaps` wrote; say whether `data` is exactly that for indices below `numel`."""
    place, last = 0, np.int64(-1)
    for i in range(indices.size):
        gap, shift = np.int64(0), 0
        while True:
            if place == data.size or shift > 56:
                return False
            byte = np.int64(data[place])
            place += 1
            gap |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        if gap >= numel - last - 1:
            return False
        last += gap + 1
        indices[i] = last
    return place == data.size


@_compile
def unite(one: Any, one_values: Any, other: Any, other_values: Any, indices: Any, values: Any) -> int:
    """Write the sum of two sparse vectors; return how many entries it has."""
    i, j, count = 0, 0, 0
    while i < one.size and j < other.size:
        if one[i] < other[j]:
            indices[count], values[count] = one[i], one_values[i]
            i += 1
        elif one[i] > other[j]:
            indices[count], values[count] = other[j], other_values[j]
            j += 1
        else:
            indices[count], values[count] = one[i], one_values[i] + other_values[j]
            i += 1
            j += 1
        count += 1
    while i < one.size:
        indices[count], values[count] = one[i], one_values[i]
        i += 1
        count += 1
    while j < other.size:
        indices[count], values[count] = other[j], other_values[j]
        j += 1
        count += 1
    return count


@_compile
def part(indices: Any, values: Any, chosen: Any, kept: Any, kept_values: Any, rest: Any, rest_values: Any) -> None:
    """Split a sparse vector: entries at the ascending positions `chosen` to `kept`, all others to `rest`."""
    taken = 0
    for i in range(indices.size):
        if taken < chosen.size and chosen[taken] == i:
            kept[taken], kept_values[taken] = indices[i], values[i]
            taken += 1
        else:
            rest[i - taken], rest_values[i - taken] = indices[i], values[i]
