"""What of a model is exchanged sparsely, and what waits: small tensors, several mini-batches, a changed world size.

Pure functions of sizes and of flat arrays by name; the wrapper of a model calls them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CodecError

Floats = NDArray[np.float32]
GRANULARITIES = ("tensor", "bucket", "model")


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tensors of a bucket that are exchanged by one call."""

    start: int  # element of the bucket
    stop: int
    sparse: bool
    parts: tuple[int, ...]  # boundaries of what is selected by itself, from 0 to stop - start


def sparse_runs(numels: Sequence[int], granularity: str = "tensor", dense_below: int = 0) -> list[Run]:
    """Cut a bucket into runs of sparse and of dense tensors: those of fewer than `dense_below` elements are dense.

    Entries are selected from each tensor, from each run of a bucket, or from the model, which is a bucket that holds
    all of it (the paper's choice: plan with `single`).

    >>> [(run.sparse, run.parts) for run in sparse_runs([1000, 10, 2000, 500], dense_below=100)]
    [(True, (0, 1000)), (False, (0, 10)), (True, (0, 2000, 2500))]
    """
    if granularity not in GRANULARITIES:
        raise CodecError(f"selection per {granularity!r}; wanted one of {', '.join(GRANULARITIES)}")
    runs: list[Run] = []
    for start, numel in zip(accumulate(numels, initial=0), numels, strict=False):
        sparse, last = numel >= dense_below, runs[-1] if runs else None
        if last is not None and last.sparse == sparse:
            end = start + numel - last.start
            parts = (*last.parts, end) if sparse and granularity == "tensor" else (0, end)
            runs[-1] = Run(last.start, start + numel, sparse, parts)
        else:
            runs.append(Run(start, start + numel, sparse, (0, numel)))
    return runs


def put_off(residual: Floats, gradient: Floats) -> None:
    """Keep a mini-batch's gradient for a later exchange: accumulation over several mini-batches costs no memory."""
    residual += gradient


def redistribute(residuals: Sequence[Mapping[str, Floats]], world_size: int) -> list[dict[str, Floats]]:
    """Give what `len(residuals)` ranks had not sent to `world_size` ranks, so that nothing is lost.

    Training applies the mean over ranks, so what is owed is (sum of residuals) / ranks, and it is that which stays the
    same, index by index: sums are scaled by new / old. New rank r takes over from the old ranks r, r + new, ...; where
    there are more new ranks than old, the others start with nothing. Exact where the ratio is a power of two and no
    two ranks are joined; else rounded once to float32.

    >>> old = [{"w": np.full(1, value, np.float32)} for value in (1, 2, 4)]
    >>> [new["w"].tolist() for new in redistribute(old, 2)]
    [[3.3333332538604736], [1.3333333730697632]]
    """
    if not residuals or world_size < 1:
        raise CodecError(f"residuals of {len(residuals)} ranks for {world_size}; wanted at least 1 of each")
    names = residuals[0].keys()
    for rank, one in enumerate(residuals):
        if one.keys() != names:
            wrong = sorted(one.keys() ^ names)[0]
            raise CodecError(f"residuals of ranks 0 and {rank} differ in {wrong!r}; load those of one checkpoint")
    scale = world_size / len(residuals)
    return [
        {name: _joined([one[name] for one in residuals[rank::world_size]], residuals[0][name], scale) for name in names}
        for rank in range(world_size)
    ]


def _joined(parts: Sequence[Floats], like: Floats, scale: float) -> Floats:
    total = np.zeros(like.shape, np.float64)
    for part in parts:
        total += part
    return (total * scale).astype(np.float32)
