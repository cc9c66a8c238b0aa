"""A codec of the language on a device: kernels make and read payloads there, and the host looks at headers only.

Kernels report a gradient that is not finite in one flag for each piece, which is copied down behind the payloads. The
host then writes a header that says so over the payload, as the codec does on the CPU, and every rank decodes NaN.
"""

from dataclasses import dataclass

import torch

from penstock.codecs.block import Block, Note, pinned
from penstock.codecs.device import DeviceCodec
from penstock.codecs.header import FLAGS_OFFSET, NOT_FINITE


@dataclass(frozen=True, slots=True)
class WireForm:
    """The codec, its kernels, and whom to tell of values that are not finite."""

    codec: DeviceCodec
    note: Note

    def encoder(self, bucket: torch.Tensor, residual: torch.Tensor | None, block: Block) -> "_Encoder":
        """Return what encodes the pieces of a block."""
        return _Encoder(self, bucket, residual, block)

    def decoder(self, block: Block, bucket: torch.Tensor, adds: bool, arrived: bool) -> "_Decoder":
        """Return what decodes a block, or adds what it holds."""
        return _Decoder(self, block, bucket, adds, arrived)


class _Encoder:
    def __init__(self, form: WireForm, bucket: torch.Tensor, residual: torch.Tensor | None, block: Block) -> None:
        self._form, self._block = form, block
        self._flags = torch.zeros(len(block.pieces), dtype=torch.int32, device=bucket.device)
        self._flags_here = pinned(len(block.pieces), torch.int32, bucket.device)
        nbytes, flags = form.codec.codec.header_nbytes, torch.split(self._flags, 1)
        self._calls = [
            (
                bucket[start:stop],
                None if residual is None else residual[start:stop],
                payload[nbytes:],
                form.codec.header(stop - start),
                flag,
            )
            for ((start, stop), _, payload), flag in zip(block.payloads(), flags, strict=True)
        ]

    def start(self) -> None:
        """Queue the kernels of each piece, and one copy of all payloads."""
        kernels, codec = self._form.codec.kernels, self._form.codec.codec
        self._flags.zero_()
        for values, residual, body, header, flag in self._calls:
            kernels.encode(values, codec.arguments, codec.next_seed(), residual, body, None, header, flag)
            if residual is not None:
                kernels.decode_add(body, residual, codec.arguments, -1.0)
        self._block.host.copy_(self._block.device, non_blocking=True)
        self._flags_here.copy_(self._flags, non_blocking=True)

    def finish(self) -> None:
        """Mark the payloads of gradients that are not finite."""
        found = self._flags_here.numpy()
        if not found.any():
            return
        self._form.note()
        for ((start, stop), payload, _), flag in zip(self._block.payloads(), found, strict=True):
            if flag:
                self._form.codec.codec.finish(payload, stop - start, 0, NOT_FINITE)


class _Decoder:
    def __init__(self, form: WireForm, block: Block, bucket: torch.Tensor, adds: bool, arrived: bool) -> None:
        self._form, self._block, self._adds, self._arrived = form, block, adds, arrived
        nbytes = form.codec.codec.header_nbytes
        self._calls = [
            (here, payload[nbytes:], bucket[start:stop], form.codec.header(stop - start))
            for (start, stop), here, payload in block.payloads()
        ]

    def start(self) -> None:
        """Queue a copy of what arrived, and the kernel of each piece; NaN where its header says so."""
        kernels, codec = self._form.codec.kernels, self._form.codec.codec
        if self._arrived:
            self._block.device.copy_(self._block.host, non_blocking=True)
        for here, body, values, header in self._calls:
            if here[FLAGS_OFFSET] & NOT_FINITE:
                self._form.note()
                values.fill_(float("nan"))
            elif self._adds:
                kernels.decode_add(body, values, codec.arguments, 1.0, header)
            else:
                kernels.decode(body, values.numel(), codec.arguments, values, header)

    def finish(self) -> None:
        """Nothing."""
