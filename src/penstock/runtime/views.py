"""Views of the user's memory and of scratch memory, without owning the former.

A view of the user's tensor is made from its address, so that a program that is kept for the next call does not
keep the tensor alive, and needs no new views when the next tensor has the same address, as buckets of gradients do.

Element types have torch's names. numpy has no bfloat16: its elements travel as their 16 bits, and only the merge kernel
knows what they mean.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import StrategyError, shorten
from penstock.runtime.pages import fresh_pages
from penstock.runtime.transport import Bytes

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "int8": np.dtype(np.int8),
    "int16": np.dtype(np.int16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "uint8": np.dtype(np.uint8),
}
ENCODED_DTYPES = ("float32", "float16", "bfloat16")  # those that a codec takes


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """Return the numpy type whose memory holds elements of `dtype`."""
    if dtype not in DTYPES:
        raise StrategyError(f"element type {dtype!r}; wanted one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


@dataclass(frozen=True, slots=True)
class Flat:
    """A contiguous tensor in host memory: where it is and what it holds."""

    address: int
    numel: int
    dtype: str  # torch's name

    @property
    def nbytes(self) -> int:
        """Its size in memory."""
        return self.numel * storage_dtype(self.dtype).itemsize


def flat(data: Any, on_device: bool = False) -> Flat:
    """Describe a contiguous numpy array or torch CPU tensor; with `on_device`, a tensor on a CUDA device.

    torch is not imported: a tensor is known by its methods.
    """
    if on_device and not is_on_cuda(data):
        raise StrategyError("tensor is in host memory; NCCL moves device memory: pass tensor.cuda()")
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous or not data.flags.writeable:
            raise StrategyError("array is not contiguous and writable; pass np.ascontiguousarray(array)")
        return Flat(data.__array_interface__["data"][0], data.size, data.dtype.name)
    if not hasattr(data, "data_ptr"):
        raise StrategyError(f"found {shorten(data)}; wanted a numpy array or a torch tensor")
    if data.device.type != ("cuda" if on_device else "cpu"):
        raise StrategyError(
            f"tensor is on {data.device}; programs run on host memory and, through a Communicator, on cuda: "
            "pass tensor.cpu()"
        )
    if not data.is_contiguous():
        raise StrategyError("tensor is not contiguous; pass tensor.contiguous()")
    return Flat(data.data_ptr(), data.numel(), str(data.dtype).removeprefix("torch."))


def is_on_cuda(data: Any) -> bool:
    """Say whether a tensor is in the memory of a CUDA device."""
    return bool(getattr(data, "is_cuda", False))


def is_contiguous(data: Any) -> bool:
    """Say whether `flat` takes an array or tensor as it is."""
    return bool(data.flags.c_contiguous if isinstance(data, np.ndarray) else data.is_contiguous())


def contiguous_copy(data: Any) -> Any:
    """Return a copy whose elements lie in order."""
    return data.copy(order="C") if isinstance(data, np.ndarray) else data.detach().clone().contiguous()


def copy_back(data: Any, result: Any) -> None:
    """Put the elements of a `contiguous_copy` back into `data`."""
    (data if isinstance(data, np.ndarray) else data.detach())[...] = result


def bytes_at(address: int, nbytes: int) -> Bytes:
    """Return a view of memory that its owner keeps alive."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    memory = memoryview((ctypes.c_uint8 * nbytes).from_address(address))
    return np.frombuffer(memory, np.uint8)


class Scratch:
    """Memory that all programs of one communicator share, since they run one after another."""

    def __init__(self) -> None:
        self.memory: Bytes = np.empty(0, np.uint8)
        self.address = 0  # of the memory

    def reserve(self, nbytes: int) -> None:
        """Make the memory at least so large; it never shrinks."""
        if nbytes > self.memory.size:
            self.memory = np.empty(0, np.uint8)  # the smaller one goes before the larger comes
            self.memory = fresh_pages(nbytes)
            self.address = self.memory.__array_interface__["data"][0]
            self.memory.fill(0)  # touch every page now rather than inside a timed collective
