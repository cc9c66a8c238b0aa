"""What each parameter's gradient still owes, kept by the parameter's name and handed out by the bucket.

A codec wants one flat residual for a bucket; buckets change when a plan does, parameters do not. So memory belongs to
a bucket, and names say where in it a parameter lies. When a parameter turns up in another bucket its values move along.
A codec may put off taking what it sent out of a residual (`codecs.feedback`); whoever asks for values sees it done.

A bucket holds gradients in memory order: torch lays each out by its parameter's strides. So do residuals. A `Layout`
says which element of the parameter each value belongs to; checkpoints have logical order (`checkpoint.py`).

Values are float32 and in the units of what is applied: gradients are divided by the number of workers first, so the
sum of all ranks' residuals is what weights are still to be changed by, whatever the number of workers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.codecs.feedback import PutOff
from penstock.errors import PlanError

Floats = NDArray[np.float32]
Room = Any  # float32 memory: a numpy array, or a tensor on a GPU where the codec works there
HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Layout:
    """In which order a bucket holds the elements of a parameter."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements; 1 where a dimension has one element only

    @classmethod
    def of(cls, parameter: torch.Tensor) -> "Layout":
        """Return the order of torch's buckets: memory order where a parameter's memory has no gaps, else logical.

        Complex numbers are pairs there, a last dimension of two.
        """
        parameter = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter
        shape, expected = tuple(parameter.shape), 1
        strides = tuple(1 if size == 1 else step for size, step in zip(shape, parameter.stride(), strict=True))
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

    def logical(self, flat: Room) -> torch.Tensor:
        """Return a copy of values in memory order as a tensor of the parameter's shape, in host memory."""
        view = torch.as_tensor(flat).as_strided(self.shape, self.strides)
        return view.to(HOST).clone(memory_format=torch.contiguous_format)

    def in_memory(self, values: torch.Tensor) -> Floats:
        """Return values of the parameter's shape, flat and in memory order."""
        flat: Floats = np.empty(values.numel(), np.float32)
        torch.from_numpy(flat).as_strided(self.shape, self.strides).copy_(values)
        return flat


class Residuals:
    """Flat float32 memory per bucket, zero at first, with a view of it per parameter."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, ...], PutOff] = {}
        self._views: dict[str, Room] = {}  # by name; where it lies now
        self._saved: dict[str, Room] | None = None

    def bucket(self, names: Sequence[str], sizes: Sequence[int], device: torch.device = HOST) -> Room:
        """Return the residual of a bucket with these parameters in this order; the same memory each time."""
        return self.deferred(names, sizes, device).values()

    def deferred(self, names: Sequence[str], sizes: Sequence[int], device: torch.device = HOST) -> PutOff:
        """Return the same for a codec that puts off what it leaves there."""
        key = tuple(names)
        if key not in self._buckets or _device(self._buckets[key].memory) != device:
            self._settle()
            memory = _zeros(sum(sizes), device)
            for name, (start, stop) in zip(key, pairwise(accumulate(sizes, initial=0)), strict=True):
                self._move(name, memory[start:stop])
            self._buckets = {each: old for each, old in self._buckets.items() if not set(each) & set(key)}
            self._buckets[key] = PutOff(memory)
        return self._buckets[key]

    def _move(self, name: str, view: Room) -> None:
        old = self._of(name, len(view))
        if old is not None:
            view[:] = torch.as_tensor(old) if isinstance(view, torch.Tensor) else _here(old)
        self._views[name] = view

    def _of(self, name: str, numel: int) -> Room | None:
        """Return what a parameter owes, None where that is nothing; refuse what belongs to another one."""
        found = self._views.get(name)
        if found is not None and len(found) != numel:
            raise PlanError(
                f"residual of {name!r} has {len(found)} elements, its parameter {numel}; load the state of this model"
            )
        return found

    def owes(self, names: Sequence[str]) -> bool:
        """Say whether anything is kept for one of these parameters."""
        return any(name in self._views for name in names)

    def take(self, name: str, numel: int) -> Room | None:
        """Return what a parameter owes and forget it: somebody is about to send all of it; None where it owes nothing.

        Its bucket goes with it, and the other parameters of that bucket keep their values.
        """
        if self._of(name, numel) is None:
            return None
        self._settle()
        self._buckets = {each: old for each, old in self._buckets.items() if name not in each}
        return self._views.pop(name)

    def values(self) -> dict[str, Floats]:
        """Return a copy of each parameter's residual, flat, in host memory."""
        self._settle()
        return {name: _here(view).copy() for name, view in self._views.items()}

    def rearrange(self, name: str, before: Layout, after: Layout) -> None:
        """Put what a parameter owes into another order of its elements."""
        if name in self._views:
            self._settle()
            for room in (self._views[name], *(saved[name] for saved in (self._saved or {},) if name in saved)):
                moved = after.in_memory(before.logical(room))
                room[:] = torch.from_numpy(moved) if isinstance(room, torch.Tensor) else moved

    def load(self, values: Mapping[str, Floats]) -> None:
        """Replace all residuals; parameters that `values` does not name owe nothing."""
        self._buckets, self._saved = {}, None
        self._views = {name: np.array(value, np.float32).reshape(-1) for name, value in values.items()}

    def multiply(self, factor: float) -> None:
        """Multiply all residuals: what a gradient scaler does to gradients must be done to what they owe."""
        self._settle()
        for view in self._views.values():
            view *= float(np.float32(factor))

    def save(self) -> None:
        """Remember all values for a `restore`."""
        self._settle()
        self._saved = {name: copied(view) for name, view in self._views.items()}

    def restore(self) -> None:
        """Go back to what the last `save` saw; parameters that it did not see owe nothing."""
        saved = self._saved or {}
        for name, view in self._views.items():
            view[:] = saved.get(name, 0.0)
        for name in saved.keys() - self._views.keys():  # taken since then
            self._views[name] = copied(saved[name])
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


def copied(room: Room) -> Room:
    """Return a copy in the same place."""
    return room.clone() if isinstance(room, torch.Tensor) else room.copy()


def _zeros(numel: int, device: torch.device) -> Room:
    return np.zeros(numel, np.float32) if device == HOST else torch.zeros(numel, device=device)


def _device(room: Room) -> torch.device:
    return room.device if isinstance(room, torch.Tensor) else HOST


def _here(room: Room) -> Floats:
    here: Floats = room.cpu().numpy() if isinstance(room, torch.Tensor) else room
    return here
