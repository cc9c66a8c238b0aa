"""Back ends run encode and decode of a program: `reference` is the meaning, `numba` and `triton` give the same bits."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

Arguments = Mapping[str, Any]  # the parameters that are not constants, by name, as `bind_arguments` returns them


class Kernels(Protocol):
    """Encode and decode of one specialised program. Vectors are numpy arrays on the CPU, torch tensors on a device."""

    def encode(self, gradient: Any, arguments: Arguments, seed: int = 0, residual: Any = None, out: Any = None) -> Any:
        """Return the payload, at the start of `out` (at least `max_nbytes`) where that is given.

        A `residual` is added to the gradient first and left holding what was not sent. Raises `NonFiniteError` for a
        gradient (with its residual) that holds NaN or infinity; the residual is then unspecified.
        """

    def decode(self, payload: Any, numel: int, arguments: Arguments, out: Any = None) -> Any:
        """Return the gradient, in `out` where that is given; raise `CodecError` for bytes that encode cannot have
        written, and then `out` is unspecified."""

    def decode_add(self, payload: Any, out: Any, arguments: Arguments, scale: float = 1.0) -> None:
        """Add `scale` times the decoded gradient to `out`: the product and the sum each rounded to float."""


class CpuKernels(Kernels, Protocol):
    """Kernels of the CPU: with feedback they also scale the gradient, and may defer; parameters can be bound."""

    def encode(
        self,
        gradient: Any,
        arguments: Arguments,
        seed: int = 0,
        residual: Any = None,
        out: Any = None,
        factor: float = 1.0,
    ) -> Any:
        """Return the payload as `Kernels` do; with a residual, of `factor` times the gradient."""

    def bound(self, kind: str, arguments: Arguments) -> Callable[..., int]:
        """Return a kernel (`encode_later`, `decode`, ...) with parameters bound; it returns below 0 for an error."""

    @property
    def subtracts(self) -> bool:
        """Whether the caller of kernel `encode_feedback` must subtract the payload from the residual."""

    @property
    def defers(self) -> bool:
        """Whether to defer feedback, by `encode_later`: where subtracting at once takes several passes."""

    def encode_later(
        self, gradient: Any, arguments: Arguments, seed: int, residual: Any, last: Any, out: Any, factor: float = 1.0
    ) -> Any:
        """Return the payload of factor * gradient + (residual - decode(last)), which is left in `residual`."""

    def decode_add_to(self, payload: Any, source: Any, out: Any, arguments: Arguments, scale: float = 1.0) -> None:
        """Write `source` + `scale` times the decoded gradient to `out`, as `decode_add` rounds; where there is an
        `encode_later`."""
