"""The few operations on gradients that an exchange leaves to the framework which holds them.

An exchange works on numpy arrays. Gradients of another kind (bfloat16 tensors, tensors on a GPU) are handed to it as
they are, together with an `Arrays` that the framework's adaptor writes (`torch/arrays.py`). Slices, `+=`, `*=`, `/=`,
`any()`, `nbytes` and assignment to slices are expected of every kind of buffer and not repeated here.
"""

from collections.abc import Callable, Sequence
from math import hypot
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Buffer = Any  # flat: a numpy array, or what the framework has in its place
Device = Any  # where a buffer lies, as the framework names it; None: in host memory


class Arrays(Protocol):
    """What an exchange asks of the framework that holds the gradients."""

    def device(self, values: Buffer) -> Device:
        """Return the device that `values` lie on; None: in host memory."""

    def zeros(self, numel: int, device: Device) -> Buffer:
        """Return float32 zeros on a device; in host memory, a numpy array."""

    def indices(self, values: NDArray[np.int64], device: Device) -> Buffer:
        """Return indices into a buffer on a device, to read and write elements of it."""

    def float32(self, values: Buffer, device: Device) -> Buffer:
        """Return `values` as float32 on a device; in host memory, as a numpy array.

        Where they are that already, the result shares their memory.
        """

    def copy(self, target: Buffer, source: Buffer) -> None:
        """Overwrite `target`, converting type, device and kind."""

    def add(self, target: Buffer, source: Buffer) -> None:
        """Add to `target`, converting device and kind."""

    def norm(self, values: Sequence[Buffer]) -> float:
        """Return the L2 norm of all buffers together."""

    def is_finite(self, values: Buffer) -> bool:
        """Return whether no value is NaN or infinite."""

    def finite_later(self, values: Buffer) -> Callable[[], bool]:
        """Return what says whether no value was NaN or infinite; on a device, the host asks it an iteration later."""

    def saved(self, values: Floats) -> Any:
        """Return an array as checkpoints of this framework hold it."""

    def loaded(self, value: Any) -> Floats | None:
        """Return what a checkpoint holds as an array; None where it is not a float32 array of this framework."""

    @property
    def saved_kind(self) -> str:
        """What `loaded` wants, in words."""


class NumpyArrays:
    """Gradients that are numpy arrays."""

    saved_kind = "a numpy array of float32"

    def device(self, values: Buffer) -> Device:
        """Return None: numpy arrays lie in host memory."""

    def zeros(self, numel: int, device: Device) -> Buffer:
        """Return float32 zeros."""
        return np.zeros(numel, np.float32)

    def indices(self, values: NDArray[np.int64], device: Device) -> Buffer:
        """Return the indices as they are."""
        return values

    def float32(self, values: Buffer, device: Device) -> Buffer:
        """Return `values` as float32, the same array where they are that already."""
        return values.astype(np.float32, copy=False)

    def copy(self, target: Buffer, source: Buffer) -> None:
        """Overwrite `target`."""
        target[...] = source

    def add(self, target: Buffer, source: Buffer) -> None:
        """Add to `target`."""
        target += source

    def norm(self, values: Sequence[Buffer]) -> float:
        """Return the L2 norm of all arrays together, each summed in float32 or in what is wider."""
        return hypot(*(float(np.linalg.norm(each.astype(np.result_type(each, np.float32)))) for each in values))

    def is_finite(self, values: Buffer) -> bool:
        """Return whether no value is NaN or infinite."""
        return bool(np.isfinite(values).all())

    def finite_later(self, values: Buffer) -> Callable[[], bool]:
        """Return what says whether no value was NaN or infinite."""
        found = self.is_finite(values)
        return lambda: found

    def saved(self, values: Floats) -> Any:
        """Return the array itself."""
        return values

    def loaded(self, value: Any) -> Floats | None:
        """Return a float32 array as it is, and None for anything else."""
        return value if isinstance(value, np.ndarray) and value.dtype == np.float32 else None


NUMPY = NumpyArrays()
