"""Encoding sparse blocks from memory that stays: one pass over gradient and residual, and one call.

`SparseCodec.encode` goes over memory three times: gradients are scaled, added to the residual, and searched for the
largest. Here a pass does all of it, a block that fits the first-level cache at a time. To know in that pass what is
large, it looks at the tensor's past: between two steps the k-th largest magnitude of gradient plus residual moves
little, and its last change says which way. Where that misled (the first steps, another learning rate) the exact select
goes over the sum once more. What is chosen never depends on the past, only the time does.
"""

# mypy: disable-error-code="untyped-decorator"
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.codecs.sparse.block import BlockForm, Bytes, index_dtype
from penstock.codecs.sparse.entry_kernels import gather, subtract_at, write_gaps
from penstock.compll.select import MAGNITUDE, _choose, _collect, _select
from penstock.private_folder import compiled

ROUND = 1024  # elements that stay in the first-level cache, with their gradients
MARGIN = 1 << 18  # a 32nd to a 64th: how far below its expected place the k-th largest magnitude is looked for, in bits
ROOM = 16  # candidates for each that is chosen: with feedback, much waits just below the k-th largest
MOST = 1 << 23  # a factor of two: further than that nothing is expected to move in a step
HISTORY = 2  # the k-th largest magnitude of the last step, and of the one before, as bits; 0: not known


def bound_encode(form: BlockForm, values: Any, factor: float, kept: Any, body: Bytes) -> Callable[[], int] | None:
    """Return what encodes `values` times `factor` plus `kept` into a body; it returns the body's bytes.

    0 where something is not finite: then the body is of no use. None where `SparseCodec.encode` must do it.
    """
    if form.value_bits != 32 or not isinstance(values, np.ndarray) or values.dtype != np.float32 or not form.count:
        return None
    if form.whole:
        return None  # nothing is searched for
    indices, history = np.zeros(form.count, index_dtype(form.numel)), np.zeros(HISTORY, np.int32)
    chosen, where = body[: form.values_nbytes].view(np.float32), body[form.values_nbytes : form.max_nbytes]
    times = np.float32(factor)
    if form.gaps:
        return lambda: int(_encode_gaps(values, times, kept, history, indices, chosen, where))
    numbers = where.view(np.int32)
    return lambda: int(_encode_numbers(values, times, kept, history, indices, chosen, numbers))


@compiled
def _encode_gaps(values: Any, factor: Any, kept: Any, history: Any, indices: Any, chosen: Any, where: Any) -> Any:
    if not _move_largest(values, factor, kept, history, indices, chosen):
        return 0
    return 4 * chosen.size + write_gaps(indices, where)


@compiled
def _encode_numbers(values: Any, factor: Any, kept: Any, history: Any, indices: Any, chosen: Any, where: Any) -> Any:
    if not _move_largest(values, factor, kept, history, indices, chosen):
        return 0
    where[:] = indices
    return 4 * chosen.size + 4 * where.size


@compiled
def _move_largest(values: Any, factor: Any, kept: Any, history: Any, indices: Any, chosen: Any) -> Any:
    """Add the gradient to `kept`, and move the largest sums from there to `chosen`; say whether all are finite."""
    add_and_select(values, factor, kept, history, indices)
    finite = gather(kept, indices, chosen)
    if finite:
        subtract_at(kept, indices, chosen)
    return finite


@compiled
def add_and_select(values: Any, factor: Any, kept: Any, history: Any, indices: Any) -> None:
    """Add `factor` times the values to `kept`, and fill `indices` with the positions of the largest sums, ascending.

    Positions are those that `select_largest` gives of the sum. `history` (`HISTORY` int32, zeros at first) is kept by
    the caller for the next time.
    """
    bits, k = kept.view(np.int32), indices.size
    limit = min(ROOM * k + 1024, bits.size // 2)
    expected = _expected(history)
    candidates = np.empty(limit if expected > 0 and k < limit else 0, indices.dtype)
    count = _add_and_collect(values, factor, kept, expected, candidates)
    history[1] = history[0]
    if k <= count <= candidates.size:
        history[0] = _choose(bits, candidates[:count], indices)
    elif k < bits.size:
        history[0] = _select(bits, indices)
    else:
        indices[:] = np.arange(k)


@compiled
def _expected(history: Any) -> Any:
    """Return a magnitude that the k-th largest should reach: it goes on as it went, in octaves, less a margin."""
    last, before = np.int64(history[0]), np.int64(history[1])
    if last == 0 or before == 0:
        return np.int32(0)
    moved = min(max(last - before, np.int64(-MOST)), np.int64(MOST))
    return np.int32(min(max(last + moved - MARGIN, np.int64(0)), np.int64(MAGNITUDE)))


@compiled
def _add_and_collect(values: Any, factor: Any, kept: Any, threshold: Any, candidates: Any) -> Any:
    """Add, and write the indices whose magnitude reaches the threshold; return how many, more than fit if too many."""
    bits, count, limit = kept.view(np.int32), 0, candidates.size
    for start in range(0, values.size, ROUND):
        # Slices: of an index that could be negative numba makes a loop that is not vectorised.
        _add(kept[start : start + ROUND], factor, values[start : start + ROUND])
        if count < limit:
            found = _collect(bits[start : start + ROUND], threshold, candidates[count:])
            for i in range(count, min(count + found, limit)):
                candidates[i] += start
            count += found
    return count


@compiled
def _add(kept: Any, factor: Any, values: Any) -> None:
    for i in range(kept.size):
        kept[i] = kept[i] + factor * values[i]
