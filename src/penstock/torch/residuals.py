"""What each parameter's gradient still owes, kept by the parameter's name and handed out by the bucket.

A codec wants one flat residual for a bucket; buckets change when a plan does, parameters do not. So memory belongs to
a bucket, and names say where in it a parameter lies. When a parameter turns up in another bucket its values move along.
A codec may put off taking what it sent out of a residual (`codecs.feedback`); whoever asks for values sees it done.

Values are float32 and in the units of what is applied: gradients are divided by the number of workers first, so the
sum of all ranks' residuals is what weights are still to be changed by, whatever the number of workers.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.codecs.feedback import PutOff
from penstock.errors import PlanError

Floats = NDArray[np.float32]


class Residuals:
    """Flat float32 memory per bucket, zero at first, with a view of it per parameter."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, ...], PutOff] = {}
        self._views: dict[str, Floats] = {}  # by name; where it lies now
        self._saved: dict[str, Floats] | None = None

    def bucket(self, names: Sequence[str], sizes: Sequence[int]) -> Floats:
        """Return the residual of a bucket with these parameters in this order; the same memory each time."""
        return self.deferred(names, sizes).values()

    def deferred(self, names: Sequence[str], sizes: Sequence[int]) -> PutOff:
        """Return the same for a codec that puts off what it leaves there."""
        key = tuple(names)
        if key not in self._buckets:
            self._settle()
            memory = np.zeros(sum(sizes), np.float32)
            for name, (start, stop) in zip(key, pairwise(accumulate(sizes, initial=0)), strict=True):
                self._move(name, memory[start:stop])
            self._buckets = {each: old for each, old in self._buckets.items() if not set(each) & set(key)}
            self._buckets[key] = PutOff(memory)
        return self._buckets[key]

    def _move(self, name: str, view: Floats) -> None:
        old = self._views.get(name)
        if old is not None and old.size != view.size:
            raise PlanError(
                f"residual of {name!r} has {old.size} elements, its parameter {view.size}; load the state of this model"
            )
        if old is not None:
            view[:] = old
        self._views[name] = view

    def values(self) -> dict[str, Floats]:
        """Return a copy of each parameter's residual, flat."""
        self._settle()
        return {name: view.copy() for name, view in self._views.items()}

    def load(self, values: Mapping[str, Floats]) -> None:
        """Replace all residuals; parameters that `values` does not name owe nothing."""
        self._buckets, self._saved = {}, None
        self._views = {name: np.array(value, np.float32).reshape(-1) for name, value in values.items()}

    def multiply(self, factor: float) -> None:
        """Multiply all residuals: what a gradient scaler does to gradients must be done to what they owe."""
        self._settle()
        for view in self._views.values():
            view *= np.float32(factor)

    def save(self) -> None:
        """Remember all values for a `restore`."""
        self._saved = self.values()

    def restore(self) -> None:
        """Go back to what the last `save` saw; parameters that it did not see owe nothing."""
        for name, view in self._views.items():
            view[:] = 0.0 if self._saved is None or name not in self._saved else self._saved[name]
        for bucket in self._buckets.values():
            bucket.forget()

    def _settle(self) -> None:
        for bucket in self._buckets.values():
            bucket.values()

    # In a copy, views would no longer look into their buckets.

    def __getstate__(self) -> dict[str, Floats]:
        return self.values()

    def __setstate__(self, values: dict[str, Floats]) -> None:
        self.load(values)
