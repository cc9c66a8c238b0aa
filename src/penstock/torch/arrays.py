"""torch's tensors as an exchange handles them (`exchange/arrays.py`), and how parameters lie in memory.

Tensors in host memory become numpy arrays of the same memory where float32 is wanted; those on a GPU stay tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.exchange.arrays import Floats
from penstock.exchange.residuals import Layout


class TorchArrays:
    """Gradients that are torch tensors; residuals and velocities are tensors on a GPU, numpy arrays in host memory."""

    saved_kind = "a tensor of torch.float32"

    def device(self, values: Any) -> torch.device | None:
        """Return the GPU that `values` lie on; None: host memory."""
        return values.device if isinstance(values, torch.Tensor) and values.is_cuda else None

    def zeros(self, numel: int, device: torch.device | None) -> Any:
        """Return float32 zeros: a tensor on a GPU, or a numpy array."""
        return np.zeros(numel, np.float32) if device is None else torch.zeros(numel, device=device)

    def indices(self, values: NDArray[np.int64], device: torch.device | None) -> Any:
        """Return indices: a tensor on a GPU, or a numpy array."""
        return values if device is None else torch.from_numpy(values).to(device)

    def float32(self, values: Any, device: torch.device | None) -> Any:
        """Return `values` as float32: a tensor on a GPU, or a numpy array; of the same memory where they are that."""
        if isinstance(values, np.ndarray):
            return values if device is None else torch.as_tensor(values, device=device)
        return values.to("cpu", torch.float32).numpy() if device is None else values.to(device, torch.float32)

    def copy(self, target: Any, source: Any) -> None:
        """Overwrite `target`, converting type, device and kind."""
        _tensor(target).copy_(_tensor(source))

    def add(self, target: Any, source: Any) -> None:
        """Add to `target`, converting device and kind."""
        where = _tensor(target)
        where += _tensor(source).to(where.device)

    def norm(self, values: Sequence[torch.Tensor]) -> float:
        """Return the L2 norm of all tensors together, each in float32 or in what is wider."""
        norms = [
            torch.linalg.vector_norm(each, dtype=torch.promote_types(each.dtype, torch.float32)).float()
            for each in map(_tensor, values)
        ]
        return float(torch.linalg.vector_norm(torch.stack(norms)))

    def is_finite(self, values: Any) -> bool:
        """Return whether no value is NaN or infinite."""
        return bool(torch.isfinite(_tensor(values)).all())

    def finite_later(self, values: torch.Tensor) -> Callable[[], bool]:
        """Return what says whether no value was NaN or infinite: queued on a GPU now, waited for when it is asked."""
        if self.device(values) is None:
            found = self.is_finite(values)
            return lambda: found
        told = torch.empty((), dtype=torch.bool, pin_memory=True)
        told.copy_(torch.isfinite(values).all(), non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(values.device))

        def ask() -> bool:
            done.synchronize()
            return bool(told)

        return ask

    def saved(self, values: Floats) -> torch.Tensor:
        """Return a CPU tensor: what torch.save and torch.distributed.checkpoint take."""
        return torch.from_numpy(values)

    def loaded(self, value: Any) -> Floats | None:
        """Return a float32 tensor as an array in logical order, and None for anything else."""
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return None
        found: Floats = value.detach().cpu().contiguous().numpy()
        return found


TORCH = TorchArrays()


def _tensor(values: Any) -> torch.Tensor:
    return values if isinstance(values, torch.Tensor) else torch.from_numpy(values)


def layout_of(parameter: torch.Tensor) -> Layout:
    """Return the order in which torch's buckets hold a parameter's elements.

    Complex numbers are pairs there, a last dimension of two.
    """
    parameter = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter
    return Layout.of(tuple(parameter.shape), parameter.stride())
