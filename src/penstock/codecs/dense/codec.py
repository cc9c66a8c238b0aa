"""A compressor as training uses it: gradients in, payloads that describe themselves out, and back.

    codec = make_codec("terngrad", bitwidth=2)
    nbytes = codec.encode(gradient, residual, out)      # out has room for codec.max_nbytes(gradient.size)
    codec.decode_add(out[:nbytes], total, scale=1 / world_size)

A payload is a header (`header.py`) and a body, the bytes that the CompLL program writes. `decode` refuses everything
that `encode` cannot have written, before it writes anything outside the output it was given.

Gradients are float32, float16 or bfloat16: numpy arrays, or torch tensors on the CPU or on the GPU. Residuals are
float32. A codec may be used from several threads at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.codecs.dense import many
from penstock.codecs.dense.device import DeviceCodec
from penstock.codecs.elements import as_array, from_float32, room, to_float32
from penstock.codecs.feedback import Residual, memory_of
from penstock.codecs.header import NOT_FINITE, PADDED, SEGMENTED, Header, header_nbytes, pack_header, parse_header
from penstock.compll.backends import CpuKernels
from penstock.compll.ir import Program
from penstock.compll.lower.payload_layout import max_nbytes, used_nbytes
from penstock.errors import CodecError, NonFiniteError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
PUT_OFF_RATIO = 0.3  # of the gradient's bytes: with more, copying the payload costs what putting off saves
_JUDGED = 1 << 20  # elements
_ADVICE = 'fix the loss, or pass on_nonfinite="skip" if a gradient scaler skips such steps'


@dataclass(slots=True)
class Codec:
    """One algorithm with its parameters."""

    program: Program
    parameters: Mapping[str, float]  # every parameter by name, in the order the program declares them
    arguments: Mapping[str, Any]  # those that kernels take
    kernels: CpuKernels  # for the CPU
    seed: int = 0  # differs between ranks, so that their rounding is independent
    on_nonfinite: str = "raise"  # what a gradient with NaN or infinity does: raise, or skip the step (AMP)
    _calls: Any = field(default_factory=count, repr=False)
    _devices: dict[str, DeviceCodec] = field(default_factory=dict, repr=False)
    _sizes: dict[int, int] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """The codec and its settings; equal names read one another's payloads."""
        named = zip(self.parameters, self.settings, strict=False)
        return f"{self.program.name}({', '.join(f'{name}={value:g}' for name, value in named)})"

    @property
    def settings(self) -> tuple[float, ...]:
        """The parameters as headers have them: zeros at the end are left out.

        So an algorithm can get a parameter that does nothing at 0, such as `block`, and its payloads stay the same.
        """
        values = list(self.parameters.values())
        while values and values[-1] == 0:
            values.pop()
        return tuple(values)

    @property
    def header_nbytes(self) -> int:
        """Bytes of the header before every body."""
        return header_nbytes(len(self.settings))

    def max_nbytes(self, numel: int) -> int:
        """Return the most bytes a payload of `numel` elements can take."""
        if numel not in self._sizes:
            self._sizes[numel] = self.header_nbytes + max_nbytes(self.program, numel, self.arguments)
        return self._sizes[numel]

    @property
    def puts_off(self) -> bool:
        """Whether a `Residual` saves time on the CPU: its payload is kept, so it must be small beside the gradient."""
        return self.kernels.defers and self.max_nbytes(_JUDGED) <= _JUDGED * 4 * PUT_OFF_RATIO

    def count_from(self, number: int) -> None:
        """Let random numbers go on from encode number `number`: with the same seed, the same calls draw the same."""
        self._calls = count(number)

    def next_seed(self) -> int:
        """Return what the next encode draws its random numbers from."""
        return self.seed << 32 | int(next(self._calls)) & 0xFFFFFFFF

    def next_seeds(self, count: int) -> int:
        """Return the first of so many seeds, one after the other, for encodes that are queued together."""
        first = int(next(self._calls))
        self.count_from(first + count)
        return self.seed << 32 | first & 0xFFFFFFFF

    def encode(self, gradient: Any, residual: Any, out: Any, tensor: str = "the gradient") -> int:
        """Write the payload of a gradient to `out`; return its bytes.

        `residual` is None, a `Residual`, or float32 memory of the gradient's size: it is added first, and left holding
        what was not sent. `tensor` is what an error calls the gradient. On a GPU nothing waits: the size returned is
        the largest possible, and a gradient that is not finite is reported by the next `check`.
        """
        seed = self.next_seed()
        if _is_cuda(gradient):
            return self._device(gradient).encode(gradient, residual, out, seed)
        values = to_float32(as_array(gradient))
        body = room(out, self.max_nbytes(values.size))[self.header_nbytes :]
        kept = memory_of(residual, values.size, tensor)
        before = self.copy_if_skipping(residual, kept)
        try:
            nbytes = self._encode(values, seed, residual, kept, body).size
        except NonFiniteError:
            if kept is not None and before is not None:
                kept[:] = before
            return self.finish_skipped(out, values.size, self.refusal(values, tensor))
        return self.finish(out, values.size, nbytes)

    def decode(self, payload: Any, out: Any) -> None:
        """Write the values of a payload to `out`; raise `CodecError` for bytes that encode cannot have written."""
        self._decode(payload, out, None)

    def decode_add(self, payload: Any, out: Any, scale: float = 1.0) -> None:
        """Add `scale` times the values of a payload to `out`; errors as `decode`."""
        self._decode(payload, out, scale)

    def encode_many(
        self, gradient: Any, boundaries: Any, residual: Any, out: Any, tensors: Sequence[str] | None = None
    ) -> int:
        """Write one payload for several tensors, the segments of one flat array on the CPU; return its bytes.

        Segment j is elements boundaries[j] to boundaries[j + 1]; each is encoded as `encode` would by itself, with its
        own scale, in one call without the interpreter. `residual` is as in `encode`, for the whole array.
        """
        return many.encode_many(self, gradient, boundaries, residual, out, tensors)

    def decode_many(self, payload: Any, boundaries: Any, out: Any) -> None:
        """Write the values of a payload of `encode_many`; the boundaries must be those it was made with."""
        many.decode_many(self, payload, boundaries, out, None)

    def decode_add_many(self, payload: Any, boundaries: Any, out: Any, scale: float = 1.0) -> None:
        """Add `scale` times the values of a payload of `encode_many`."""
        many.decode_many(self, payload, boundaries, out, scale)

    def max_nbytes_many(self, boundaries: Any) -> int:
        """Return the most bytes a payload of `encode_many` can take."""
        return many.max_nbytes_many(self, boundaries)

    def payload_nbytes(self, payload: Any) -> int:
        """Return how many of the bytes in a buffer are its payload; raise `CodecError` if they are not all there."""
        data = as_array(payload)
        header = self._check(parse_header(data.data), None)
        nbytes = header.nbytes + header.body_nbytes
        if nbytes > data.size:
            raise CodecError(f"payload of {data.size} bytes; its header says {nbytes}: it was cut short")
        return nbytes

    def on(self, device: Any) -> DeviceCodec:
        """Return the codec on a device; made once."""
        key = str(device)
        if key not in self._devices:
            self._devices[key] = DeviceCodec.create(self, device)
        return self._devices[key]

    def check(self, tensor: str = "the gradient") -> None:
        """Raise what GPU kernels found wrong since the last check; waits for the device."""
        for device in self._devices.values():
            device.kernels.check(tensor)

    def subtract(self, body: Any, values: Any) -> None:
        """Take a body's values off `values`: what a `Residual` has put off."""
        if isinstance(body, np.ndarray):
            self.kernels.decode_add(body, as_array(values), self.arguments, -1.0)
        else:
            self._device(values).kernels.decode_add(body, values, self.arguments, -1.0)

    # What `encode` and `encode_many` share

    def finish(self, out: Any, numel: int, body_nbytes: int, flags: int = 0) -> int:
        """Write the header before a body; return the bytes of both."""
        header = Header(*self._identity, numel, body_nbytes, flags)
        as_array(out)[: header.nbytes] = np.frombuffer(pack_header(header), np.uint8)
        return header.nbytes + header.body_nbytes

    def finish_skipped(self, out: Any, numel: int, why: str, flags: int = 0) -> int:
        """Raise for a gradient that is refused, or write the payload that makes every rank skip the step."""
        if self.on_nonfinite == "raise":
            raise NonFiniteError(why) from None
        return self.finish(out, numel, 0, NOT_FINITE | flags)

    def copy_if_skipping(self, residual: Any, kept: Floats | None) -> Floats | None:
        """Return what a step that is skipped must leave in the residual; None where it raises instead."""
        if self.on_nonfinite == "raise" or kept is None:
            return None
        if isinstance(residual, Residual):
            residual.values()
        return kept.copy()

    def refusal(self, values: Floats, tensor: str) -> str:
        """Return what an error says of values that were refused: not finite, or too large for the codec's fields."""
        return not_finite(tensor) if not np.isfinite(values).all() else too_large(self.name, tensor)

    def open(self, payload: Any, numel: int, segmented: bool) -> tuple[Header, NDArray[np.uint8]]:
        """Return the header and the body of a payload, checked against what is expected."""
        data = as_array(payload)
        header = self._check(parse_header(data.data), numel)
        if bool(header.flags & SEGMENTED) != segmented:
            found, wanted = ("several tensors", "decode_many") if header.flags & SEGMENTED else ("one tensor", "decode")
            raise CodecError(f"payload of {found}: read it with {wanted}")
        body = data[header.nbytes :]
        if body.size != header.body_nbytes:
            how = "cut short" if body.size < header.body_nbytes else "too long"
            raise CodecError(f"body of {body.size} bytes; its header says {header.body_nbytes}: it is {how}")
        return header, body

    # Inside

    @property
    def _identity(self) -> tuple[str, tuple[float, ...]]:
        return self.program.name, self.settings

    def _device(self, tensor: Any) -> DeviceCodec:
        return self.on(tensor.device)

    def _encode(self, values: Floats, seed: int, residual: Any, kept: Floats | None, body: Bytes) -> Any:
        """Return the body on the CPU; a `Residual` has it taken off by the next call, where the codec can."""
        if not isinstance(residual, Residual) or not self.kernels.defers:
            if isinstance(residual, Residual):
                residual.values()
            return self.kernels.encode(values, self.arguments, seed, kept, body)
        assert kept is not None
        last = as_array(residual.pending) if residual.waits_for(self) else None
        residual.pending = None  # where this raises, the residual is of no use any more
        if last is not None:
            made = self.kernels.encode_later(values, self.arguments, seed, kept, last, body, residual.factor)
        else:
            kept += values * np.float32(residual.factor)
            made = self.kernels.encode(kept, self.arguments, seed, None, body)
        residual.pending = last  # memory to be used again
        residual.put_off(self, made)
        return made

    def _decode(self, payload: Any, out: Any, scale: float | None) -> None:
        if _is_cuda(out):
            self._device(out).decode(payload, out, scale)
            return
        target = as_array(out)
        header, body = self.open(payload, target.size, segmented=False)
        if header.flags & PADDED and not header.flags & NOT_FINITE:
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
        if not header.flags & SEGMENTED and header.body_nbytes > self.max_nbytes(header.numel) - header.nbytes:
            raise CodecError(
                f"body of {header.body_nbytes} bytes for {header.numel} elements is more than any can take"
            )
        return header


def not_finite(tensor: str = "the gradient") -> str:
    """Return what an error says of values that are not finite."""
    return f"{tensor} holds NaN or infinity; {_ADVICE}"


def too_large(codec: str, tensor: str = "the gradient") -> str:
    """Return what an error says of finite values that a codec has no bits for."""
    return f"{tensor}, with what is owed of it, holds values that are too large for {codec}; {_ADVICE}"


def _is_cuda(values: Any) -> bool:
    return getattr(values, "is_cuda", False) is True
