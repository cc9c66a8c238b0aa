"""Gradients of every element type as the float32 vectors that kernels work on, and back.

numpy has no bfloat16: as everywhere in penstock (`runtime.views`), an array of uint16 holds its bits. A torch tensor
on the CPU is looked at through its memory, without a copy.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CodecError

Floats = NDArray[np.float32]


def as_array(values: Any) -> NDArray[Any]:
    """Return a flat numpy view of an array or of a CPU tensor; bfloat16 as uint16."""
    array: NDArray[Any] = values if isinstance(values, np.ndarray) else _tensor_memory(values)
    if not array.flags.c_contiguous:
        raise CodecError("a codec works on contiguous memory; call .contiguous() first")
    return array.reshape(-1)


def _tensor_memory(tensor: Any) -> NDArray[Any]:
    import torch

    tensor = tensor.detach()
    if not tensor.is_contiguous():
        raise CodecError("a codec works on contiguous memory; call .contiguous() first")
    view: NDArray[Any] = tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
    return view


def room(out: Any, nbytes: int) -> NDArray[np.uint8]:
    """Return the memory to write a payload to; kernels check nothing there."""
    found = as_array(out)
    if found.size < nbytes:
        raise CodecError(f"room for {found.size} bytes; wanted {nbytes}, which is what max_nbytes says")
    return found


def to_float32(values: NDArray[Any]) -> Floats:
    """Return values as float32: the same memory where they already are.

    >>> to_float32(np.array([0x3F80, 0xC000], np.uint16))
    array([ 1., -2.], dtype=float32)
    """
    if values.dtype == np.float32:
        return values
    if values.dtype == np.float16:
        return values.astype(np.float32)
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    raise CodecError(f"gradients of {values.dtype} cannot be encoded; use float32, float16 or bfloat16")


def from_float32(values: Floats, out: NDArray[Any]) -> None:
    """Write float32 values to memory of another element type, rounded to nearest, ties to even."""
    if out.dtype != np.uint16:
        with np.errstate(over="ignore"):
            out[:] = values
        return
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    out[:] = np.where(np.isnan(values), np.uint32(0x7FC0), rounded)
