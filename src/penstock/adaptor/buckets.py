"""Where a session keeps gradients: buckets of those that travel together, side by side in memory."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.exchange.exchange import Handle, ResolvedBucket
from penstock.runtime.views import storage_dtype
from penstock.trace import ITEMSIZE

Array = NDArray[Any]
Zeros = Callable[[Sequence[int], str], Any]
FIRST_NBYTES = 25 * 1024 * 1024  # of a bucket before there is a plan, as in torch's DistributedDataParallel
ALIGNMENT = 64  # bytes


@dataclass(frozen=True, slots=True)
class Gradient:
    """What one parameter's gradient is, the same on all ranks."""

    name: str  # of its parameter; the others have other names
    shape: tuple[int, ...]
    dtype: str  # float32, float64, float16 or bfloat16

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its bytes in memory."""
        return self.numel * storage_dtype(self.dtype).itemsize

    def __str__(self) -> str:
        """Return name, shape and type as text, which ranks compare."""
        return f"{self.name!r}, {self.shape} of {self.dtype}"


@dataclass(frozen=True, slots=True, eq=False)
class BucketMemory:
    """Where a bucket's gradients lie side by side: one flat array, and a view of it for each gradient."""

    flat: Array
    views: list[Array]  # each gradient, in order

    @classmethod
    def of(cls, gradients: Sequence[Gradient], zeros: Zeros) -> "BucketMemory":
        """Return memory for gradients of one type; `zeros` makes it, flat, for so many elements each."""
        sizes = [each.numel for each in gradients]
        flat = zeros(sizes, gradients[0].dtype)
        bounds = zip(gradients, pairwise(accumulate(sizes, initial=0)), strict=True)
        return cls(flat, [flat[start:stop].reshape(each.shape) for each, (start, stop) in bounds])

    @property
    def is_held(self) -> bool:
        """Whether anything else refers to a view."""
        return any(sys.getrefcount(self.views[number]) > 2 for number in range(len(self.views)))  # the list, and here


@dataclass(slots=True, eq=False)
class Bucket:
    """Gradients that travel together, in one type."""

    members: tuple[int, ...]  # of the session's gradients, in order
    resolved: ResolvedBucket
    new_memory: Callable[[], BucketMemory]
    is_divided: bool = False  # its gradients are, by the ranks, as they are put into it
    memory: BucketMemory = field(init=False)
    copies: BucketMemory | None = None  # that were given away instead
    missing: set[int] = field(default_factory=set)  # of this iteration
    handle: Handle | None = None  # of this iteration, once it is under way
    is_lent: bool = False  # its averages were given away: the memory is used again once nothing refers to them
    sources: dict[int, Array] = field(default_factory=dict)  # of this iteration: gradients that are read where they are

    def __post_init__(self) -> None:
        self.memory = self.new_memory()

    @property
    def sent(self) -> list[Array]:
        """Where its gradients are, each flat, where some are read where they are; else nothing."""
        if not self.sources:
            return []
        return [self.sources.get(number, view.reshape(-1)) for number, view in enumerate(self.memory.views)]

    def forget(self) -> None:
        """Expect every gradient again: those of the next iteration."""
        self.missing, self.sources = set(self.members), {}

    def take_back(self) -> None:
        """Have memory that nothing else refers to: its own again, or new."""
        if self.is_lent and self.memory.is_held:
            self.memory = self.new_memory()
        self.is_lent = False

    def copied(self) -> list[Array]:
        """Return the averages in memory that nothing else refers to: that of the last copies, or new.

        New memory costs more than the copy.
        """
        if self.copies is None or self.copies.is_held:
            self.copies = self.new_memory()
        np.copyto(self.copies.flat, self.memory.flat)
        return self.copies.views


def first_groups(gradients: Sequence[Gradient]) -> list[list[int]]:
    """Return the last gradients first, since backward passes begin at the end, in buckets of a moderate size."""
    groups, nbytes = [list[int]()], 0
    for index in reversed(range(len(gradients))):
        if groups[-1] and nbytes + gradients[index].nbytes > FIRST_NBYTES:
            groups.append([])
            nbytes = 0
        groups[-1].append(index)
        nbytes += gradients[index].nbytes
    return groups


def sizes_of(gradients: Sequence[Gradient]) -> tuple[str, dict[str, int]]:
    """Return the type that most bytes have, and how many elements each gradient has, counted in that type."""
    by_type: Counter[str] = Counter()
    for each in gradients:
        by_type[each.dtype] += each.nbytes
    dtype = by_type.most_common(1)[0][0]
    return dtype, {each.name: -(-each.nbytes // ITEMSIZE[dtype]) for each in gradients}


def aligned_zeros(sizes: Sequence[int], dtype: str) -> Array:
    """Return zeros for arrays side by side: of as many bytes as possible, at addresses that frameworks take over.

    TensorFlow copies arrays that begin elsewhere. Here the first one begins 40 bytes before such an address:

    >>> found = aligned_zeros([10, 16000, 1600], "float32")
    >>> [each.__array_interface__["data"][0] % 64 for each in (found, found[10:], found[16010:])]
    [24, 0, 0]
    """
    itemsize = storage_dtype(dtype).itemsize
    nbytes: Counter[int] = Counter()  # that begin so many bytes behind a multiple of 64 if the first array is at one
    for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
        nbytes[start * itemsize % ALIGNMENT] += size
    wanted = max(nbytes, key=nbytes.__getitem__, default=0)
    room = np.zeros(sum(sizes) * itemsize + ALIGNMENT, np.uint8)
    first = -(room.__array_interface__["data"][0] + wanted) % ALIGNMENT
    return room[first : first + sum(sizes) * itemsize].view(numpy_dtype(dtype))


def is_nan_first(values: Any) -> bool:
    """Say whether the first element is NaN."""
    first = values.reshape(-1)[:1]
    return bool((first != first).any())


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return numpy's type; bfloat16 is of ml_dtypes, which every framework that has such gradients brings."""
    if dtype != "bfloat16":
        return np.dtype(dtype)
    import ml_dtypes

    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found
