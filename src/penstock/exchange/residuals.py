"""What each parameter's gradient still owes, kept by the parameter's name and handed out by the bucket.

A codec wants one flat residual for a bucket; buckets change when a plan does, parameters do not. So memory belongs to
a bucket, and names say where in it a parameter lies. When a parameter turns up in another bucket its values move along.
A codec may put off taking what it sent out of a residual (`codecs.feedback`); reading values settles that first.

A bucket holds gradients in memory order: torch lays each out by its parameter's strides. So do residuals. A `Layout`
says which element of the parameter each value belongs to; checkpoints have logical order (`state.py`).

Values are float32 and in the units of what is applied: gradients are divided by the number of workers first, so the
sum of all ranks' residuals is what weights are still to be changed by, whatever the number of workers.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

import numpy as np
from numpy.lib.stride_tricks import as_strided

from penstock.codecs.feedback import DeferredResidual
from penstock.errors import PlanError
from penstock.exchange.arrays import NUMPY, Arrays, Buffer, Device, Floats


@dataclass(frozen=True, slots=True)
class Layout:
    """In which order a bucket holds the elements of a parameter."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements; 1 where a dimension has one element only

    @classmethod
    def of(cls, shape: tuple[int, ...], strides: tuple[int, ...]) -> "Layout":
        """Return memory order where memory with these strides, in elements, has no gaps, else logical order."""
        expected = 1
        strides = tuple(1 if size == 1 else step for size, step in zip(shape, strides, strict=True))
        for step, size in sorted((step, size) for step, size in zip(strides, shape, strict=True) if size != 1):
            if step != expected:
                return cls.contiguous(shape)
            expected *= size
        return cls(shape, strides)

    @classmethod
    def contiguous(cls, shape: tuple[int, ...]) -> "Layout":
        """Return logical order: the last dimension varies fastest.

        >>> Layout.contiguous((2, 3)).strides
        (3, 1)
        """
        steps = list(accumulate(reversed(shape[1:]), mul, initial=1))[::-1]
        return cls(shape, tuple(1 if size == 1 else step for size, step in zip(shape, steps, strict=False)))

    def logical(self, flat: Floats) -> Floats:
        """Return a copy of values in memory order as an array of the parameter's shape, in logical order."""
        return self._view(flat).copy(order="C")

    def in_memory(self, values: Floats) -> Floats:
        """Return values of the parameter's shape, flat and in memory order."""
        flat: Floats = np.empty(values.size, np.float32)
        self._view(flat)[...] = values
        return flat

    def _view(self, flat: Floats) -> Floats:
        return as_strided(flat, self.shape, [step * flat.itemsize for step in self.strides])


class Residuals:
    """Flat float32 memory per bucket, zero at first, with a view of it per parameter."""

    def __init__(self, arrays: Arrays = NUMPY) -> None:
        self._arrays = arrays
        self._buckets: dict[tuple[str, ...], DeferredResidual] = {}
        self._views: dict[str, Buffer] = {}  # by name; where it lies now
        self._saved: dict[str, Buffer] | None = None
        self.version = 0  # changes when some bucket's memory is no longer what `deferred` returned for it

    def bucket(self, names: Sequence[str], sizes: Sequence[int], device: Device = None) -> Buffer:
        """Return the residual of a bucket with these parameters in this order; the same memory each time."""
        return self.deferred(names, sizes, device).values()

    def deferred(self, names: Sequence[str], sizes: Sequence[int], device: Device = None) -> DeferredResidual:
        """Return the same for a codec that puts off what it leaves there."""
        key = tuple(names)
        if key not in self._buckets or self._arrays.device(self._buckets[key].memory) != device:
            self._settle(key)
            memory = self._arrays.zeros(sum(sizes), device)
            for name, (start, stop) in zip(key, pairwise(accumulate(sizes, initial=0)), strict=True):
                self._move(name, memory[start:stop])
            self._buckets = {each: old for each, old in self._buckets.items() if not set(each) & set(key)}
            self._buckets[key] = DeferredResidual(memory)
            self.version += 1
        return self._buckets[key]

    def _move(self, name: str, view: Buffer) -> None:
        old = self._of(name, len(view))
        if old is not None:
            self._arrays.copy(view, old)
        self._views[name] = view

    def _of(self, name: str, numel: int) -> Buffer | None:
        """Return the parameter's residual, or None; refuse one of another number of elements."""
        found = self._views.get(name)
        if found is not None and len(found) != numel:
            raise PlanError(
                f"residual of {name!r} has {len(found)} elements, its parameter {numel}; load the state of this model"
            )
        return found

    def owes(self, names: Sequence[str]) -> bool:
        """Return whether anything is kept for one of these parameters."""
        return not self._views.keys().isdisjoint(names)

    def take(self, name: str, numel: int) -> Buffer | None:
        """Return the parameter's residual and forget it, since all of it is sent now; None where there is none.

        Its bucket goes with it, and the other parameters of that bucket keep their values.
        """
        if self._of(name, numel) is None:
            return None
        self._settle([name])
        self._buckets = {each: old for each, old in self._buckets.items() if name not in each}
        self.version += 1
        return self._views.pop(name)

    def add(self, name: str, values: Floats) -> None:
        """Add to the residual of a parameter what another rank had kept of it, in memory order."""
        self._settle([name])
        if (kept := self._of(name, values.size)) is None:
            self._views[name] = values
        else:
            self._arrays.add(kept, values)

    def values(self) -> dict[str, Floats]:
        """Return a copy of each parameter's residual, flat, in host memory."""
        self._settle()
        return {name: self._on_host(view).copy() for name, view in self._views.items()}

    def copy_to(self, rooms: Mapping[str, Floats]) -> None:
        """Write each parameter's residual into its room, flat; zeros where it has none.

        Nothing is settled, so that the bits of iterations to come do not depend on who reads residuals.
        """
        for room in [room for name, room in rooms.items() if name not in self._views]:
            room[...] = 0.0
        loose = self._views.keys() & rooms.keys()
        for names, bucket in self._buckets.items():
            bucket.copy_to([rooms[name] for name in names])
            loose -= set(names)
        for name in loose:
            rooms[name][...] = self._views[name]

    def rearrange(self, name: str, before: Layout, after: Layout) -> None:
        """Put the parameter's residual into another order of its elements."""
        if name in self._views:
            self._settle()
            for room in (self._views[name], *(saved[name] for saved in (self._saved or {},) if name in saved)):
                self._arrays.copy(room, after.in_memory(before.logical(self._on_host(room))))

    def load(self, values: Mapping[str, Floats]) -> None:
        """Replace all residuals; parameters that `values` does not name owe nothing."""
        self._buckets, self._saved = {}, None
        self._views = {name: np.array(value, np.float32).reshape(-1) for name, value in values.items()}
        self.version += 1

    def multiply(self, factor: float) -> None:
        """Multiply all residuals: what a gradient scaler does to gradients must be done to what they owe."""
        self._settle()
        for view in self._views.values():
            view *= float(np.float32(factor))

    def save(self) -> None:
        """Remember all values for a `restore`."""
        self._settle()
        self._saved = {name: self.copied(view) for name, view in self._views.items()}

    def restore(self) -> None:
        """Go back to the values of the last `save`; parameters that had none then owe nothing."""
        saved = self._saved or {}
        for name, view in self._views.items():
            if name in saved:
                self._arrays.copy(view, saved[name])  # from where it was saved: a bucket may have moved it since
            else:
                view[:] = 0.0
        for name in saved.keys() - self._views.keys():  # taken since then
            self._views[name] = self.copied(saved[name])
        for bucket in self._buckets.values():
            bucket.forget()
        self.version += 1

    def copied(self, room: Buffer) -> Buffer:
        """Return a copy on the same device."""
        copy = self._arrays.zeros(len(room), self._arrays.device(room))
        self._arrays.copy(copy, room)
        return copy

    def _on_host(self, room: Buffer) -> Floats:
        here: Floats = self._arrays.float32(room, None)
        return here

    def _settle(self, names: Collection[str] | None = None) -> None:
        """Take off what was put off, of buckets with these parameters; None: of all.

        Sums of a bucket's next encode would be in another order: which buckets are new when another is encoded must not
        change its bits, as that depends on how far each lane is.
        """
        for each, bucket in self._buckets.items():
            if names is None or not set(each).isdisjoint(names):
                bucket.values()

    # In a copy, views would no longer look into their buckets.

    def __getstate__(self) -> tuple[Arrays, dict[str, Floats]]:
        return self._arrays, self.values()

    def __setstate__(self, state: tuple[Arrays, dict[str, Floats]]) -> None:
        self.__init__(state[0])  # type: ignore[misc]
        self.load(state[1])
