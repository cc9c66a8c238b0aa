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
from functools import cached_property
from importlib.util import find_spec
from itertools import count as numbers
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from penstock.codecs.codec import (
    ADVICE,
    Bound,
    Bytes,
    Capabilities,
    Decoded,
    DecodeFrom,
    Encoded,
    EncodeInto,
    Floats,
    HeaderCodec,
    not_finite,
)
from penstock.codecs.dense import bound
from penstock.codecs.dense.device_codec import DeviceCodec
from penstock.codecs.elements import as_array, from_float32, room, to_float32
from penstock.codecs.feedback import Residual, memory_of
from penstock.codecs.header import NOT_FINITE, PADDED, Header, check_numel, header_nbytes, pack_header, parse_header
from penstock.compll.backends import CpuKernels
from penstock.compll.backends.reference import ReferenceKernels
from penstock.compll.ir import Program
from penstock.compll.lower.payload_layout import max_nbytes, used_nbytes
from penstock.errors import CodecError, NonFiniteError

PUT_OFF_RATIO = 0.3  # of the gradient's bytes: with more, copying the payload costs what putting off saves
_JUDGED = 1 << 20  # elements
_ENCODES_BITS = 16  # of the counter of encodes, that count within an iteration; the others count iterations
_RANK_BITS = 16  # of a seed
_FEEDBACK_NUMEL = 4096  # eight buckets of qsgd's; its noise does not depend on more
_FEEDBACK_STEPS = 24  # enough for a growth of 3% a step to show


@dataclass
class DenseCodec(HeaderCodec):
    """One algorithm of the language with its parameters; `capabilities` are those of its kernels."""

    program: Program
    parameters: Mapping[str, float]  # every parameter by name, in the order the program declares them
    arguments: Mapping[str, Any]  # those that kernels take
    kernels: CpuKernels  # for the CPU
    seed: int = 0  # differs between ranks, so that their rounding is independent
    on_nonfinite: str = "raise"  # what a gradient with NaN or infinity does: raise, skip the step (AMP), or note
    defers_nonfinite_check: bool = False  # on a GPU it may be noted one call later
    _calls: Any = field(default_factory=numbers, repr=False)
    _devices: dict[str, DeviceCodec] = field(default_factory=dict, repr=False)
    _sizes: dict[int, int] = field(default_factory=dict, repr=False)
    _forms: dict[Any, Any] = field(default_factory=dict, repr=False)  # on each device, for programs

    @property
    def name(self) -> str:
        """The codec and its settings; equal names read one another's payloads."""
        named = zip(self.parameters, self.settings, strict=False)
        return f"{self.program.name}({', '.join(f'{name}={value:g}' for name, value in named)})"

    @cached_property
    def settings(self) -> tuple[float, ...]:
        """The parameters as headers have them: zeros at the end are left out.

        So an algorithm can get a parameter that does nothing at 0, such as `block`, and its payloads stay the same.
        """
        values = list(self.parameters.values())
        while values and values[-1] == 0:
            values.pop()
        return tuple(values)

    @cached_property
    def header_nbytes(self) -> int:
        """Bytes of the header before every body."""
        return header_nbytes(len(self.settings))

    def max_nbytes(self, numel: int) -> int:
        """Return the most bytes a payload of `numel` elements can take; refuse more elements than one can hold."""
        if numel not in self._sizes:
            check_numel(numel)
            self._sizes[numel] = self.header_nbytes + max_nbytes(self.program, numel, self.arguments)
        return self._sizes[numel]

    @property
    def fingerprint(self) -> str:
        """Of the text that the codec was made from, and of the operators that it calls."""
        return self.program.fingerprint

    @cached_property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """Deferred feedback saves time on the CPU where the payload, which is kept, is small beside the gradient."""
        variable_size = any(item.counts for item in self.program.layout.fields)
        is_elementwise = self.kernels.defers or not (self.kernels.subtracts or variable_size)
        defers = is_elementwise and self.max_nbytes(_JUDGED) <= _JUDGED * 4 * PUT_OFF_RATIO
        return Capabilities(
            deferred_feedback=defers,
            variable_size=variable_size,
            half_precision=True,
            scaled_add=True,
            reads_sources=defers,
            device_form=self.on_nonfinite != "skip" and find_spec("triton") is not None,
            defers_nonfinite_check=self.defers_nonfinite_check,
        )

    @cached_property
    def takes_feedback(self) -> bool:  # type: ignore[override]
        """Whether residuals stay bounded, found by trying: the same on every rank, as the numbers are always the same.

        Feedback converges where a codec leaves less than it was given: over some steps |x - decode(encode(x))| must
        shrink (Karimireddy et al., 2019, call it a contraction). A quantiser that rounds at random is right on
        average, but its noise may be larger than the values: qsgd with 4 bits rounds a value of a bucket of 512 to a
        multiple of a seventh of the bucket's norm, so what it leaves is 1.4 times what it was given, and a residual
        would grow each step. Such a codec sends what it makes of each gradient and forgets the rest.
        """
        kernels = ReferenceKernels(self.program)  # its bits are those of all back ends, and it compiles nothing
        left = np.random.default_rng(0).standard_normal(_FEEDBACK_NUMEL, np.float32)
        before = float(np.linalg.norm(left))
        for step in range(_FEEDBACK_STEPS):
            kernels.decode_add(kernels.encode(left, self.arguments, step), left, self.arguments, -1.0)
        return float(np.linalg.norm(left)) <= before

    def for_bucket(self, number: int) -> Self:
        """Return the codec with random numbers of its own: `seed` has the rank below, and the bucket's number above."""
        found = super().for_bucket(number)
        found.seed = self.seed + (number << _RANK_BITS) & 0xFFFFFFFF
        return found

    def begin(self, iteration: int) -> None:
        """Draw what this iteration always draws, so that a resumed run rounds as an unbroken one would."""
        self.count_from(iteration << _ENCODES_BITS)

    def count_from(self, number: int) -> None:
        """Let random numbers go on from encode number `number`: with the same seed, the same calls draw the same."""
        self._calls = numbers(number)

    def next_seed(self) -> int:
        """Return what the next encode draws its random numbers from."""
        return self.seed << 32 | int(next(self._calls)) & 0xFFFFFFFF

    def next_seeds(self, count: int) -> int:
        """Return the first of so many seeds, one after the other, for encodes that are queued together."""
        first = int(next(self._calls))
        self._calls = numbers(first + count)
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
        before = self._copy_if_skipping(residual, kept)
        try:
            nbytes = self._encode(values, seed, residual, kept, body).size
        except NonFiniteError:
            if kept is not None and before is not None:
                kept[:] = before
            if self.on_nonfinite == "skip":  # every rank skips the step
                return self.refuse(values.size, out)
            finite = np.isfinite(values).all()
            raise NonFiniteError(too_large(self.name, tensor) if finite else not_finite(tensor)) from None
        return self.finish(out, values.size, nbytes)

    def decode(self, payload: Any, out: Any) -> None:
        """Write the values of a payload to `out`; raise `CodecError` for bytes that encode cannot have written."""
        self._decode(payload, out, None)

    def decode_add(self, payload: Any, out: Any, scale: float = 1.0) -> None:
        """Add `scale` times the values of a payload to `out`; errors as `decode`."""
        self._decode(payload, out, scale)

    # What programs call

    def bind_encode(self, values: Any, residual: Any, out: Any) -> Bound:
        """Return an encode of memory that stays; quick where feedback is put off."""
        return bound.encodes(self, [Encoded(values, residual, out)]) or super().bind_encode(values, residual, out)

    def bind_decode(self, payload: Any, out: Any, adds: bool, factor: float = 1.0) -> Bound:
        """Return a decode of memory that stays."""
        usual = super().bind_decode(payload, out, adds, factor)
        return bound.decodes(self, [usual], [Decoded(payload, out, factor)], adds) or usual

    def bind_encodes(self, pieces: Sequence[Encoded]) -> Bound:
        """Return an encode of pieces that stay: one compiled call, where feedback is put off."""
        return bound.encodes(self, pieces) or super().bind_encodes(pieces)

    def bind_decodes(self, pieces: Sequence[Decoded], adds: bool) -> Bound:
        """Return a decode of pieces that stay: one compiled call."""
        usual = [super(DenseCodec, self).bind_decode(each.payload, each.out, adds, each.factor) for each in pieces]
        return bound.decodes(self, usual, pieces, adds) or super().bind_decodes(pieces, adds)

    def bind_encode_into(self, values: Any, residual: Any) -> EncodeInto:
        """Return an encode of values that stay, for payloads that may be anywhere."""
        return bound.encode_into(self, values, residual) or super().bind_encode_into(values, residual)

    def bind_decode_from(self, out: Any, adds: bool) -> DecodeFrom:
        """Return a decode to memory that stays, of payloads that may be anywhere."""
        usual = super().bind_decode_from(out, adds)
        return bound.decode_from(self, usual, out, adds) or usual

    def on_device(self, device: Any, note: Any = None) -> Any:
        """Return the codec's form on a device, None where it has none; `note` is told of values that are not finite."""
        if not self.capabilities.device_form:
            return None
        from penstock.codecs.dense.wire_device import make_form

        if note is not None:
            return make_form(self.on(device), note)
        if device not in self._forms:
            self._forms[device] = make_form(self.on(device), self.note_nonfinite)
        return self._forms[device]

    def refuse(self, numel: int, out: Any) -> int:
        """Write the payload of values that are not finite; return its bytes."""
        return self.finish(out, numel, 0, NOT_FINITE)

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

    def subtract_to(self, body: Any, values: Any, out: Any) -> None:
        """Write to `out`, on the CPU, what `subtract` leaves of `values`, which stay as they are."""
        self.kernels.decode_add_to(body, values, out, self.arguments, -1.0)

    # Payloads

    def finish(self, out: Any, numel: int, body_nbytes: int, flags: int = 0) -> int:
        """Write the header before a body; return the bytes of both."""
        header = Header(*self._identity, numel, body_nbytes, flags)
        as_array(out)[: header.nbytes] = np.frombuffer(pack_header(header), np.uint8)
        return header.nbytes + header.body_nbytes

    def open(self, payload: Any, numel: int) -> tuple[Header, NDArray[np.uint8]]:
        """Return the header and the body of a payload, checked against what is expected."""
        data = as_array(payload)
        header = self._check(parse_header(data.data), numel)
        body = data[header.nbytes :]
        if body.size != header.body_nbytes:
            how = "cut short" if body.size < header.body_nbytes else "too long"
            raise CodecError(f"body of {body.size} bytes; its header says {header.body_nbytes}: it is {how}")
        return header, body

    # Inside

    def _copy_if_skipping(self, residual: Any, kept: Floats | None) -> Floats | None:
        """Return what a step that is skipped must leave in the residual; None where it is not skipped."""
        if self.on_nonfinite != "skip" or kept is None:
            return None
        if isinstance(residual, Residual):
            residual.values()
        return kept.copy()

    @property
    def _identity(self) -> tuple[str, tuple[float, ...]]:
        return self.program.name, self.settings

    def _device(self, tensor: Any) -> DeviceCodec:
        return self.on(tensor.device)

    def _encode(self, values: Floats, seed: int, residual: Any, kept: Floats | None, body: Bytes) -> Any:
        """Return the body on the CPU; a `Residual` has it taken off by the next call, where that saves a pass."""
        if not isinstance(residual, Residual):
            return self.kernels.encode(values, self.arguments, seed, kept, body)
        if not self.kernels.defers:
            return self.kernels.encode(values, self.arguments, seed, residual.values(), body, residual.factor)
        assert kept is not None
        last = as_array(residual.pending) if residual.waits_for(self) else None
        residual.pending = None  # where this raises, the residual is of no use any more
        if last is not None:
            made = self.kernels.encode_later(values, self.arguments, seed, kept, last, body, residual.factor)
        else:
            latest = values * np.float32(residual.factor)
            total = latest + kept
            made = self.kernels.encode(latest, self.arguments, seed, kept, body)
            kept[:] = total  # what it sends is taken off by the next call
        residual.pending = last  # memory to be used again
        residual.defer(self, made)
        return made

    def _decode(self, payload: Any, out: Any, scale: float | None) -> None:
        if _is_cuda(out):
            self._device(out).decode(payload, out, scale)
            return
        target = as_array(out)
        header, body = self.open(payload, target.size)
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
        if header.body_nbytes > self.max_nbytes(header.numel) - header.nbytes:
            raise CodecError(
                f"body of {header.body_nbytes} bytes for {header.numel} elements is more than any can take"
            )
        return header


def too_large(codec: str, tensor: str = "the gradient") -> str:
    """Return what an error says of finite values that a codec has no bits for."""
    return f"{tensor}, with what is owed of it, holds values that are too large for {codec}; {ADVICE}"


def _is_cuda(values: Any) -> bool:
    return getattr(values, "is_cuda", False) is True
