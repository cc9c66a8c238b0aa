"""Kernels on sorted sparse vectors, compiled by numba and run without the interpreter lock.

A sparse vector is two arrays: strictly ascending indices (int32, or int64 where the tensor has 2^31 elements or more)
and their float32 values. All loops are one pass and run on one thread.
"""

# mypy: disable-error-code="untyped-decorator"
from typing import Any

import numpy as np

from penstock.compll.select import MAGNITUDE, _kth_largest
from penstock.private_folder import compiled

SAMPLE = 1 << 12  # elements that bracket the k-th largest of a merged block


@compiled
def gather(values: Any, indices: Any, out: Any) -> bool:
    """Copy the chosen values to `out`; say whether all are finite.

    The select puts NaN above infinity above every number, so what it chose has one of them if anything has.
    """
    finite = True
    for i in range(indices.size):
        out[i] = values[indices[i]]
        finite &= bool(np.isfinite(out[i]))
    return finite


@compiled
def subtract_at(values: Any, indices: Any, taken: Any) -> None:
    """Take values off at their indices."""
    for i in range(indices.size):
        values[indices[i]] -= taken[i]


@compiled
def add_at(values: Any, indices: Any, added: Any) -> None:
    """Add values at their indices."""
    for i in range(indices.size):
        values[indices[i]] += added[i]


@compiled
def put_at(values: Any, indices: Any, put: Any) -> None:
    """Replace the values at the indices."""
    for i in range(indices.size):
        values[indices[i]] = put[i]


@compiled
def ascending_below(indices: Any, numel: int) -> Any:
    """Say whether indices are strictly ascending, from 0 to less than `numel`."""
    good = True
    last = np.int64(-1)
    for i in range(indices.size):
        good &= indices[i] > last
        last = np.int64(indices[i])
    return good and last < numel


@compiled
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


@compiled
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


@compiled
def unite(one: Any, one_values: Any, other: Any, other_values: Any, indices: Any, values: Any) -> int:
    """Write the sum of two sparse vectors; return how many entries it has.

    Which comes next is as good as random, so the loop has no branch to guess wrong: an entry that is not next adds 0.
    So do those at the end: a value without another has one rule wherever it stands, -0 becomes 0.
    """
    i, j, count, zero = 0, 0, 0, np.float32(0)
    while i < one.size and j < other.size:
        mine, theirs, my_value, their_value = one[i], other[j], one_values[i], other_values[j]
        first, second = mine <= theirs, theirs <= mine
        indices[count] = min(mine, theirs)
        values[count] = (my_value if first else zero) + (their_value if second else zero)
        i += first
        j += second
        count += 1
    for k in range(i, one.size):
        indices[count], values[count] = one[k], one_values[k] + zero
        count += 1
    for k in range(j, other.size):
        indices[count], values[count] = other[k], other_values[k] + zero
        count += 1
    return count


@compiled
def cut(indices: Any, values: Any, count: int, work: Any, chosen: Any, chosen_values: Any) -> Any:
    """Move the `count` largest entries of a sparse vector to `chosen`; the rest move to the vector's own beginning.

    Among equal magnitudes the first are chosen. `work` is int32 of the vector's size, `chosen` has one entry of room
    more than it gets: like `unite`, the loop writes before it knows. Returns how many entries are left.
    """
    bits = values.view(np.int32)
    threshold, ties = _kth_largest_of_many(bits, count, work)
    taken, left = 0, 0
    for i in range(indices.size):
        index, value, magnitude = indices[i], values[i], bits[i] & MAGNITUDE
        tie = (magnitude == threshold) & (ties > 0)
        ties -= tie
        take = (magnitude > threshold) | tie
        chosen[taken], chosen_values[taken] = index, value
        indices[left], values[left] = index, value
        taken += take
        left += not take
    return left


@compiled
def _kth_largest_of_many(bits: Any, k: int, work: Any) -> Any:
    """Return the k-th largest magnitude, and how many equal to it are among the k largest (1 <= k <= n).

    A sample of m elements says between which magnitudes it lies: give or take four standard deviations of the sample's
    rank and three elements. One pass counts what is above and collects what is between, a few percent; the answer is
    there, or, where the sample misled, found by looking at everything.
    """
    numel = bits.size
    stride = max(1, numel // SAMPLE)
    count = numel // stride
    for i in range(count):
        work[i] = bits[i * stride] & MAGNITUDE
    expected = count * k / numel
    margin = 4 * np.sqrt(expected * (1 - k / numel)) + 3
    high, low = MAGNITUDE, np.int32(0)
    if expected - margin >= 1:
        high, _ = _kth_largest(work[:count], int(expected - margin))
    if expected + margin + 1 <= count:
        low, _ = _kth_largest(work[:count], int(expected + margin) + 1)
    above, between = 0, 0
    for i in range(numel):
        magnitude = bits[i] & MAGNITUDE
        work[between] = magnitude
        above += magnitude > high
        between += (magnitude >= low) & (magnitude <= high)
    if above < k <= above + between:
        return _kth_largest(work[:between], k - above)
    return _kth_largest(bits, k)
