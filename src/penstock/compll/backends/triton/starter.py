"""Launches kernels with less time on the host than Triton's own launcher takes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


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
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        if not tensors[0].is_cuda:
            kernel[(programs,)](*arguments, *constants)
            return
        key = (kernel, *constants, *((tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors))
        compiled = self._compiled.get(key)
        if compiled is None:
            options = {"num_warps": warps, "enable_fp_fusion": False}
            self._compiled[key] = kernel[(programs,)](*arguments, *constants, **options)
        else:
            compiled[(programs, 1, 1)](*arguments, *constants, stream=stream)
