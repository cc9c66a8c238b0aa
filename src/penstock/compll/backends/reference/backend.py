"""The meaning of a compressor: its IR run statement by statement on numpy arrays. Slow, plain, and right by definition.

Single precision throughout, each operation rounded; only float sums are carried in double precision and rounded once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.compll.backends import Arguments
from penstock.compll.backends.reference.machine import Machine
from penstock.compll.backends.reference.values import Array
from penstock.compll.functions import FUNCTIONS, Function
from penstock.compll.ir import GRADIENT, LATEST, Program
from penstock.compll.lower.payload_layout import Bytes, pack, place_fields, scalar_at, unpack
from penstock.compll.operators import OPERATORS, Operator
from penstock.compll.types import Scalar, Vector
from penstock.errors import CodecError, NonFiniteError

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ReferenceKernels:
    """Encode and decode of one program, on numpy."""

    program: Program
    functions: Mapping[str, Function] = field(default_factory=lambda: FUNCTIONS)
    operators: Mapping[str, Operator] = field(default_factory=lambda: OPERATORS)

    def encode(
        self,
        gradient: Floats,
        arguments: Arguments,
        seed: int = 0,
        residual: Floats | None = None,
        out: Bytes | None = None,
    ) -> Bytes:
        """Return the payload; see `Kernels`."""
        with np.errstate(all="ignore"):
            total = gradient if residual is None else gradient + residual
        if not np.isfinite(total).all():
            raise NonFiniteError(f"the gradient holds {int((~np.isfinite(total)).sum())} values that are not finite")
        machine = self._machine(arguments, seed, total.size)
        machine.vectors |= {GRADIENT: total, LATEST: gradient}
        machine.run(self.program.encode.statements)
        payload = self._write(machine)
        if residual is not None:
            residual[:] = total - self.decode(payload, total.size, arguments)
        if out is None:
            return payload
        out[: payload.size] = payload
        return out[: payload.size]

    def decode(self, payload: Bytes, numel: int, arguments: Arguments, out: Floats | None = None) -> Floats:
        """Return the gradient; see `Kernels`."""
        machine = self._machine(arguments, 0, numel)
        self._read(machine, payload, numel)
        self._check(machine)
        machine.run(self.program.decode.statements)
        result = machine.vectors[self.program.decode.result]
        if out is None:
            return result
        out[:] = result
        return out

    def decode_add(self, payload: Bytes, out: Floats, arguments: Arguments, scale: float = 1.0) -> None:
        """Add a multiple of the decoded gradient; see `Kernels`."""
        out += np.float32(scale) * self.decode(payload, out.size, arguments)

    def _machine(self, arguments: Arguments, seed: int, numel: int) -> Machine:
        machine = Machine(arguments, seed, self.functions, self.operators)
        machine.counts |= {GRADIENT: numel, LATEST: numel}
        return machine

    def _write(self, machine: Machine) -> Bytes:
        pieces: list[Bytes] = []
        for placed, source in zip(self.program.layout.fields, self.program.encode.fields, strict=True):
            if isinstance(source, str):
                assert isinstance(placed.type, Vector)
                check_sent(placed.name, machine.vectors[source])
                pieces.append(pack(machine.vectors[source], placed.type.element))
            else:
                assert isinstance(placed.type, Scalar)
                value = np.asarray(machine.value(source), placed.type.storage)
                check_sent(placed.name, value)
                pieces.append(np.frombuffer(value.tobytes(), np.uint8))
        return np.concatenate(pieces) if pieces else np.empty(0, np.uint8)

    def _read(self, machine: Machine, payload: Bytes, numel: int) -> None:
        for placed in place_fields(self.program.layout, payload, numel):
            data = payload[placed.offset : placed.offset + placed.nbytes]
            if isinstance(placed.field.type, Vector):
                values = unpack(data, placed.field.type.element, placed.size)
                if placed.field.type.element.is_float and not np.isfinite(values).all():
                    raise CodecError(f"{placed.field.name} holds values that are not finite: the payload is damaged")
                machine.payload_fields.append(values)
            else:
                machine.payload_fields.append(scalar_at(payload, placed.offset, placed.field))
            if placed.field.counts:
                machine.counts[placed.field.counts] = int(machine.payload_fields[-1])

    def _check(self, machine: Machine) -> None:
        for number, expr in self.program.decode.checks:
            wanted, found = machine.value(expr), machine.payload_fields[number]
            if wanted != found:
                name = self.program.layout.fields[number].name
                raise CodecError(f"{name} is {found}; wanted {wanted}: the payload is damaged or of other parameters")


def check_sent(name: str, values: Array) -> None:
    """Refuse a float field that overflowed: values near the largest float have no finite sum."""
    if values.dtype == np.float32 and not np.isfinite(values).all():
        raise NonFiniteError(f"{name} is not finite: the gradient's values are too large")
