"""Launches kernels with less time on the host than Triton's own launcher takes, and compiles them beforehand."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from triton import AsyncCompileMode

_COMPILERS = 8  # kernels that are compiled side by side


def compile_side_by_side(compiles: Sequence[Callable[[], Any]]) -> None:
    """Call what compiles a kernel each, all at a time: one after the other takes seconds."""
    if compiles:
        with ThreadPoolExecutor(_COMPILERS) as pool, AsyncCompileMode(pool):
            for each in compiles:
                each()


def _variant(kernel: Any, arguments: Sequence[Any], constants: Sequence[Any]) -> tuple[Any, ...]:
    """Return what a kernel is compiled for."""
    tensors = (argument for argument in arguments if isinstance(argument, torch.Tensor))
    return (kernel, *constants, *((tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors))


def _options(warps: int) -> dict[str, Any]:
    return {"num_warps": warps, "enable_fp_fusion": False}


@dataclass(slots=True)
class Starter:
    """Keeps compiled kernels by what they are compiled for.

    Triton's launcher inspects every argument at each call to find the variant it has compiled. What it decides on
    (constants, element types, 16-byte alignment) is the key here, and the variant is called directly.
    """

    _compiled: dict[Any, Any] = field(default_factory=dict)

    def start(
        self,
        kernel: Any,
        programs: int,
        arguments: Sequence[Any],
        constants: Sequence[Any],
        warps: int = 4,
        stream: int | None = None,
    ) -> None:
        """Launch a kernel on a stream, the current one if it is not given; on the CPU, interpret it."""
        if not _is_on_cuda(arguments):
            kernel[(programs,)](*arguments, *constants)
            return
        key = _variant(kernel, arguments, constants)
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = kernel[(programs,)](*arguments, *constants, **_options(warps))
        else:
            compiled[(programs, 1, 1)](*arguments, *constants, stream=stream)


def _is_on_cuda(arguments: Sequence[Any]) -> bool:
    return next(argument for argument in arguments if isinstance(argument, torch.Tensor)).is_cuda


@dataclass(slots=True)
class Rehearsal:
    """Stands in for a `Starter`: launches nothing, and notes each variant of a kernel once, to have it compiled."""

    _new: dict[Any, Callable[[], Any]] = field(default_factory=dict)
    _known: set[Any] = field(default_factory=set)

    def start(
        self,
        kernel: Any,
        programs: int,
        arguments: Sequence[Any],
        constants: Sequence[Any],
        warps: int = 4,
        stream: int | None = None,
    ) -> None:
        """Note what would be launched; arguments as those of `Starter.start`."""
        key = _variant(kernel, arguments, constants)
        if key not in self._known:
            self._known.add(key)
            if _is_on_cuda(arguments):  # elsewhere it is interpreted
                self._new[key] = lambda: kernel.warmup(*arguments, *constants, grid=(programs,), **_options(warps))

    def compile(self) -> None:
        """Compile what was noted since the last time, side by side."""
        new = [*self._new.values()]
        self._new.clear()
        compile_side_by_side(new)
