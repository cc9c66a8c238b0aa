"""The part of a codec that runs on a GPU: headers that already lie there, and nothing that waits.

The host cannot look at a payload on the device without waiting for it, so a kernel compares the header with the one it
expects, byte by byte, before it believes anything behind it. What is wrong is reported by `check`.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.codecs.feedback import Residual
from penstock.codecs.header import PADDED, Header, pack_header
from penstock.errors import CodecError

if TYPE_CHECKING:
    from penstock.codecs.codec import Codec
    from penstock.compll.backends.triton import TritonKernels


@dataclass(slots=True)
class DeviceCodec:
    """A codec on one device."""

    codec: "Codec"
    device: Any
    kernels: "TritonKernels"
    _headers: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def create(cls, codec: "Codec", device: Any) -> "DeviceCodec":
        """Return the codec on a device; imports Triton."""
        from penstock.compll.backends.triton import TritonKernels

        return cls(codec, device, TritonKernels(codec.program, device))

    def encode(self, gradient: Any, residual: Any, out: Any, seed: int) -> int:
        """Queue an encode; return the bytes to send."""
        codec, numel = self.codec, gradient.numel()
        nbytes = codec.max_nbytes(numel)
        header, body = self.header(numel), out[codec.header_nbytes : nbytes]
        if not isinstance(residual, Residual):
            self.kernels.encode(gradient, codec.arguments, seed, residual, body, None, header)
            if residual is not None:
                self.kernels.decode_add(body, residual, codec.arguments, -1.0)
            return nbytes
        self.kernels.encode(gradient, codec.arguments, seed, residual.memory, body, residual.pending, header)
        residual.put_off(codec, body)
        return nbytes

    def decode(self, payload: Any, out: Any, scale: float | None) -> None:
        """Queue a decode, or with a scale a decode-and-add."""
        codec = self.codec
        if payload.numel() != codec.max_nbytes(out.numel()):
            wanted = codec.max_nbytes(out.numel())
            raise CodecError(f"payload of {payload.numel()} bytes; wanted {wanted} for {out.numel()} elements")
        header, body = self.header(out.numel()), payload[codec.header_nbytes :]
        if scale is None:
            self.kernels.decode(body, out.numel(), codec.arguments, out, header)
        else:
            self.kernels.decode_add(body, out, codec.arguments, scale, header)

    def header(self, numel: int) -> Any:
        """Return the header for a size, on the device; made once."""
        import torch

        if numel not in self._headers:
            codec = self.codec
            flags = PADDED if any(item.counts for item in codec.program.layout.fields) else 0
            nbytes = codec.max_nbytes(numel) - codec.header_nbytes
            packed = pack_header(Header(codec.program.name, tuple(codec.parameters.values()), numel, nbytes, flags))
            self._headers[numel] = torch.from_numpy(np.frombuffer(packed, np.uint8).copy()).to(self.device)
        return self._headers[numel]
