"""A compressor as training uses it: gradients in, payloads that describe themselves out, and back.

    codec = make_codec("terngrad", bitwidth=2)
    nbytes = codec.encode(gradient, residual, out)      # out has room for codec.max_nbytes(gradient.size)
    codec.decode_add(out[:nbytes], total, scale=1 / world_size)

A payload is a header (`header.py`) and a body, the bytes that the CompLL program writes. `decode` refuses everything
that `encode` cannot have written, before it writes anything outside the output it was given.

Gradients are float32, float16 or bfloat16: numpy arrays, or torch tensors on the CPU or on the GPU. Residuals are
float32. A codec may be used from several threads at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.codecs.device import DeviceCodec
from penstock.codecs.elements import as_array, from_float32, to_float32
from penstock.codecs.feedback import Residual
from penstock.codecs.header import NOT_FINITE, PADDED, Header, header_nbytes, pack_header, parse_header
from penstock.compll.backends import Kernels
from penstock.compll.ir import Program
from penstock.compll.layout import max_nbytes, used_nbytes
from penstock.errors import CodecError, NonFiniteError

Bytes = NDArray[np.uint8]
ON_NONFINITE = ("raise", "skip")


@dataclass(slots=True)
class Codec:
    """One algorithm with its parameters."""

    program: Program
    parameters: Mapping[str, float]  # every parameter by name, in the order the program declares them
    arguments: Mapping[str, Any]  # those that kernels take
    kernels: Kernels  # for the CPU
    seed: int = 0  # differs between ranks, so that their rounding is independent
    on_nonfinite: str = "raise"  # what a gradient with NaN or infinity does: raise, or skip the step (AMP)
    _calls: Any = field(default_factory=count, repr=False)
    _devices: dict[str, DeviceCodec] = field(default_factory=dict, repr=False)
    _sizes: dict[int, int] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """The codec and its settings; equal names read one another's payloads."""
        settings = ", ".join(f"{name}={value:g}" for name, value in self.parameters.items())
        return f"{self.program.name}({settings})"

    @property
    def header_nbytes(self) -> int:
        """Bytes of the header before every body."""
        return header_nbytes(len(self.parameters))

    def max_nbytes(self, numel: int) -> int:
        """Return the most bytes a payload of `numel` elements can take."""
        if numel not in self._sizes:
            self._sizes[numel] = self.header_nbytes + max_nbytes(self.program, numel, self.arguments)
        return self._sizes[numel]

    def encode(self, gradient: Any, residual: Any, out: Any, tensor: str = "the gradient") -> int:
        """Write the payload of a gradient to `out`; return its bytes.

        `residual` is None, a `Residual`, or float32 memory of the gradient's size: it is added first, and left holding
        what was not sent. `tensor` is what an error calls the gradient. On a GPU nothing waits: the size returned is
        the largest possible, and a gradient that is not finite is reported by the next `check`.
        """
        seed = self.seed << 32 | next(self._calls) & 0xFFFFFFFF
        if _is_cuda(gradient):
            return self._device(gradient).encode(gradient, residual, out, seed)
        values = to_float32(as_array(gradient))
        body = as_array(out)[self.header_nbytes :]
        kept = None if residual is None else as_array(residual.values() if isinstance(residual, Residual) else residual)
        if kept is not None and (kept.dtype != np.float32 or kept.size != values.size):
            found = f"{kept.size} elements of {kept.dtype}"
            raise CodecError(f"the residual of {tensor} has {found}; wanted {values.size} of float32")
        try:
            self._refuse_if_skipping(values, kept)
            nbytes = self.kernels.encode(values, self.arguments, seed, kept, body).size
        except NonFiniteError:
            if self.on_nonfinite == "raise":
                advice = 'fix the loss, or pass on_nonfinite="skip" if a gradient scaler skips such steps'
                raise NonFiniteError(f"{tensor} holds NaN or infinity; {advice}") from None
            return self._finish(out, Header(*self._identity, values.size, 0, NOT_FINITE))
        return self._finish(out, Header(*self._identity, values.size, nbytes))

    def decode(self, payload: Any, out: Any) -> None:
        """Write the values of a payload to `out`; raise `CodecError` for bytes that encode cannot have written."""
        self._decode(payload, out, None)

    def decode_add(self, payload: Any, out: Any, scale: float = 1.0) -> None:
        """Add `scale` times the values of a payload to `out`; errors as `decode`."""
        self._decode(payload, out, scale)

    def payload_nbytes(self, payload: Any) -> int:
        """Return how many of the bytes in a buffer are its payload; raise `CodecError` if they are not all there."""
        data = as_array(payload)
        header = self._check(parse_header(data.data), None)
        nbytes = header.nbytes + header.body_nbytes
        if nbytes > data.size:
            raise CodecError(f"payload of {data.size} bytes; its header says {nbytes}: it was cut short")
        return nbytes

    def check(self, tensor: str = "the gradient") -> None:
        """Raise what GPU kernels found wrong since the last check; waits for the device."""
        for device in self._devices.values():
            device.kernels.check(tensor)

    def subtract(self, body: Any, values: Any) -> None:
        """Take a body's values off `values`: what a `Residual` has put off."""
        self._device(values).kernels.decode_add(body, values, self.arguments, -1.0)

    # Inside

    @property
    def _identity(self) -> tuple[str, tuple[float, ...]]:
        return self.program.name, tuple(self.parameters.values())

    def _device(self, tensor: Any) -> DeviceCodec:
        key = str(tensor.device)
        if key not in self._devices:
            self._devices[key] = DeviceCodec.create(self, tensor.device)
        return self._devices[key]

    def _finish(self, out: Any, header: Header) -> int:
        as_array(out)[: header.nbytes] = np.frombuffer(pack_header(header), np.uint8)
        return header.nbytes + header.body_nbytes

    def _refuse_if_skipping(self, values: NDArray[np.float32], kept: NDArray[Any] | None) -> None:
        """Look before anything is changed: a step that is skipped must leave the residual alone."""
        if self.on_nonfinite == "skip" and kept is not None and not np.isfinite(values).all():
            raise NonFiniteError("skip")

    def _decode(self, payload: Any, out: Any, scale: float | None) -> None:
        if _is_cuda(out):
            self._device(out).decode(payload, out, scale)
            return
        data, target = as_array(payload), as_array(out)
        header = self._check(parse_header(data.data), target.size)
        body = data[header.nbytes :]
        if body.size != header.body_nbytes:
            how = "cut short" if body.size < header.body_nbytes else "too long"
            raise CodecError(f"body of {body.size} bytes; its header says {header.body_nbytes}: it is {how}")
        if header.flags & PADDED:
            body = body[: used_nbytes(self.program.layout, body, target.size)]
        values = target if target.dtype == np.float32 else to_float32(target)
        if header.flags & NOT_FINITE:
            values[:] = np.nan
        elif scale is None:
            self.kernels.decode(body, target.size, self.arguments, values)
        else:
            self.kernels.decode_add(body, values, self.arguments, scale)
        if values is not target:
            from_float32(values, target)

    def _check(self, header: Header, numel: int | None) -> Header:
        if (header.codec, header.parameters) != self._identity:
            settings = ", ".join(f"{value:g}" for value in header.parameters)
            raise CodecError(
                f"payload of {header.codec}({settings}); wanted {self.name}: all ranks need the same codec"
            )
        if numel is not None and header.numel != numel:
            raise CodecError(f"payload of {header.numel} elements; wanted {numel}: it belongs to another tensor")
        if header.body_nbytes > self.max_nbytes(header.numel) - header.nbytes:
            raise CodecError(
                f"body of {header.body_nbytes} bytes for {header.numel} elements is more than any can take"
            )
        return header


def _is_cuda(values: Any) -> bool:
    return getattr(values, "is_cuda", False) is True
