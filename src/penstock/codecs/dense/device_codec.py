"""The part of a codec that runs on a GPU: headers that already lie there, and nothing that waits.

The host cannot look at a payload on the device without waiting for it, so a kernel compares the header with the one it
expects, byte by byte, before it believes anything behind it. What is wrong is reported by `check`.

The one exception is `on_nonfinite="skip"`: a step that is skipped must leave the residual as it was, so the gradient is
looked at first, one more read of it, and the host waits for the answer, as a gradient scaler does each step anyway.
Decoding waits for the header then. Neither can be captured in a CUDA graph.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.codecs.feedback import Residual
from penstock.codecs.header import NOT_FINITE, PADDED, Header, pack_header
from penstock.errors import CodecError

if TYPE_CHECKING:
    from penstock.codecs.dense.dense_codec import DenseCodec
    from penstock.compll.backends.triton.backend import TritonKernels


@dataclass(slots=True)
class DeviceCodec:
    """A codec on one device."""

    codec: "DenseCodec"
    device: Any
    kernels: "TritonKernels"
    _headers: dict[tuple[int, bool], Any] = field(default_factory=dict)

    @classmethod
    def create(cls, codec: "DenseCodec", device: Any) -> "DeviceCodec":
        """Return the codec on a device; imports Triton."""
        from penstock.compll.backends.triton.backend import TritonKernels

        return cls(codec, device, TritonKernels(codec.program, device))

    def encode(self, gradient: Any, residual: Any, out: Any, seed: int) -> int:
        """Queue an encode; return the bytes to send."""
        codec, numel = self.codec, gradient.numel()
        nbytes = codec.max_nbytes(numel)
        header, body = self.header(numel), out[codec.header_nbytes : nbytes]
        if codec.on_nonfinite == "skip" and not gradient.isfinite().all():
            out[: codec.header_nbytes] = self.header(numel, is_skipped=True)
            return nbytes
        if not isinstance(residual, Residual):
            self.kernels.encode(gradient, codec.arguments, seed, residual, body, None, header, settle=True)
            return nbytes
        self.kernels.encode(gradient, codec.arguments, seed, residual.memory, body, residual.pending, header)
        residual.defer(codec, body)
        return nbytes

    def decode(self, payload: Any, out: Any, scale: float | None) -> None:
        """Queue a decode, or with a scale a decode-and-add."""
        codec = self.codec
        if payload.numel() != codec.max_nbytes(out.numel()):
            wanted = codec.max_nbytes(out.numel())
            raise CodecError(f"payload of {payload.numel()} bytes; wanted {wanted} for {out.numel()} elements")
        header, body = self.header(out.numel()), payload[codec.header_nbytes :]
        if codec.on_nonfinite == "skip" and self._is_skipped(payload, out.numel()):
            out.fill_(float("nan"))
        elif scale is None:
            self.kernels.decode(body, out.numel(), codec.arguments, out, header)
        else:
            self.kernels.decode_add(body, out, codec.arguments, scale, header)

    def _is_skipped(self, payload: Any, numel: int) -> bool:
        """Say whether a payload carries nothing because a gradient was not finite; waits for the device."""
        found = payload[: self.codec.header_nbytes] == self.header(numel, is_skipped=True)
        return bool(found.all())

    def header(self, numel: int, is_skipped: bool = False) -> Any:
        """Return the header for a size, on the device; made once."""
        import torch

        if (numel, is_skipped) not in self._headers:
            codec = self.codec
            flags = PADDED if any(item.counts for item in codec.program.layout.fields) else 0
            flags = NOT_FINITE if is_skipped else flags
            nbytes = codec.max_nbytes(numel) - codec.header_nbytes
            packed = pack_header(Header(codec.program.name, codec.settings, numel, nbytes, flags))
            self._headers[numel, is_skipped] = torch.from_numpy(np.frombuffer(packed, np.uint8).copy()).to(self.device)
        return self._headers[numel, is_skipped]
