"""The meaning of a compressor: its IR run statement by statement on numpy arrays. Slow, plain, and right by definition.

Single precision throughout, each operation rounded; only float sums are carried in double precision and rounded once.
Integers wrap, and casts cut and clamp, as `ir.py` says.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.compll import philox
from penstock.compll.backends import Arguments
from penstock.compll.functions import FUNCTIONS, Function
from penstock.compll.ir import (
    GRADIENT,
    LATEST,
    Apply,
    Expr,
    Filter,
    GroupReduce,
    Length,
    Let,
    Map,
    Program,
    Read,
    Reduce,
    Statement,
    walk,
)
from penstock.compll.lower.payload_layout import Bytes, pack, place_fields, scalar_at, size_at, unpack
from penstock.compll.operators import OPERATORS, Operator
from penstock.compll.types import BOOL, Kind, Scalar, Vector
from penstock.errors import CodecError, NonFiniteError

Array = NDArray[Any]

ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "land": np.logical_and,
    "lor": np.logical_or,
    "not": np.logical_not,
    "select": np.where,
    "mod": np.fmod,
}


def divide_integers(left: Any, right: Any) -> Any:
    """Return the quotient cut towards zero, as C does."""
    a, b = np.asarray(left, np.int64), np.asarray(right, np.int64)
    return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(np.int32)


def read_at(vector: Array, index: Any, dtype: np.dtype[Any]) -> Any:
    """Return `vector[index]`, the index held inside; 0 from an empty vector."""
    if vector.size == 0:
        return np.zeros(np.shape(index), dtype)
    return vector[np.clip(index, 0, vector.size - 1)]


def cast(value: Any, source: Scalar, target: Scalar) -> Any:
    """Return a value as another type: a float cut towards zero and held in range, NaN as 0; an integer its low bits."""
    dtype = np.dtype(target.storage)
    if source.is_float and not target.is_float:
        top = np.float32(min(target.high, 2147483520))  # the largest float below 2^31
        held = np.where(value > np.float32(target.low), value, np.where(np.isnan(value), 0, np.float32(target.low)))
        return np.where(held < top, held, top).astype(dtype)
    if target.kind is Kind.UINT and source is not BOOL:
        return (np.asarray(value).astype(np.int64) & target.high).astype(dtype)
    return np.asarray(value).astype(dtype)


def reduce_values(values: Array, reducer: str) -> Any:
    """Return the smallest, the greatest or the sum of a vector that is not empty."""
    if reducer == "sum":
        return np.float32(values.sum(dtype=np.float64)) if values.dtype == np.float32 else values.sum(dtype=np.int32)
    found = values.min() if reducer == "smaller" else values.max()
    return found + values.dtype.type(0)  # -0 becomes +0


def group_reduce(values: Array, reducer: str, group: int) -> Array:
    """Return one reduction per `group` neighbours."""
    if values.size == 0:
        return values
    starts = np.arange(0, values.size, group)
    if reducer == "sum":
        wide = np.float64 if values.dtype == np.float32 else values.dtype
        return np.add.reduceat(values.astype(wide), starts).astype(values.dtype)
    reduced = (np.minimum if reducer == "smaller" else np.maximum).reduceat(values, starts)
    return np.asarray(reduced + values.dtype.type(0))


@dataclass(slots=True)
class Machine:
    """Runs the statements of one procedure: its scalars, vectors and sizes so far."""

    arguments: Mapping[str, Any]  # the parameters that are not constants
    seed: int
    functions: Mapping[str, Function]
    operators: Mapping[str, Operator]
    scalars: dict[str, Any] = field(default_factory=dict)
    vectors: dict[str, Array] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    payload_fields: list[Any] = field(default_factory=list)

    def run(self, statements: tuple[Statement, ...]) -> None:
        """Run statements in order."""
        with np.errstate(all="ignore"):
            for statement in statements:
                self._run(statement)

    def _run(self, statement: Statement) -> None:
        match statement:
            case Let():
                self.scalars[statement.name] = self.value(statement.expr)
            case Map():
                self.vectors[statement.name] = self.over(statement.length, statement.expr)
            case Reduce():
                values = self.over(statement.length, statement.expr)
                self.scalars[statement.name] = self.reduce(statement, values)
            case GroupReduce():
                values = self.over(statement.over, statement.expr)
                self.vectors[statement.name] = group_reduce(values, statement.reducer, statement.group)
            case Filter():
                keep = self.over(statement.over, statement.keep)
                self.vectors[statement.name] = self.over(statement.over, statement.value)[keep]
            case Apply():
                self.vectors[statement.name] = self.apply(statement)
            case Read():
                self.vectors[statement.name] = self.payload_fields[statement.field]
        if statement.name in self.vectors and statement.name not in self.counts:
            self.counts[statement.name] = self.vectors[statement.name].size

    def size(self, length: Length) -> int:
        """Return a length in elements."""
        return size_at(length, self.counts)

    def over(self, length: Length, expr: Expr) -> Array:
        """Return an expression at every element of a length."""
        size = self.size(length)
        index = np.arange(size, dtype=np.int32)
        value = self._value(expr, index, {})
        return np.ascontiguousarray(np.broadcast_to(np.asarray(value, expr.type.storage), (size,)))

    def value(self, expr: Expr) -> Any:
        """Return a scalar expression."""
        with np.errstate(all="ignore"):
            value = self._value(expr, np.zeros(1, np.int32), {})
        return np.asarray(value, expr.type.storage).reshape(-1)[0]

    def _value(self, expr: Expr, index: Array, known: dict[int, Any]) -> Any:
        if id(expr) not in known:
            arguments = [self._value(argument, index, known) for argument in expr.args]
            known[id(expr)] = self._compute(expr, arguments, index)
        return known[id(expr)]

    def _compute(self, expr: Expr, arguments: list[Any], index: Array) -> Any:
        dtype = np.dtype(expr.type.storage)
        match expr.op:
            case "const":
                return dtype.type(expr.value)
            case "param":
                return dtype.type(self.arguments[expr.value])
            case "name":
                return self.scalars[expr.value]
            case "field":
                return self.payload_fields[expr.value]
            case "element":
                return self.vectors[expr.value]
            case "index":
                return index
            case "size":
                return np.int32(self.counts[expr.value])
            case "at":
                return read_at(self.vectors[expr.value], arguments[0], dtype)
            case "random":
                return self.random(expr, arguments, index)
            case "call":
                return np.asarray(self.functions[expr.value].numpy(*arguments)).astype(dtype, copy=False)
            case "cast":
                return cast(arguments[0], expr.args[0].type, expr.type)
            case "div" if not expr.type.is_float:
                return divide_integers(arguments[0], arguments[1])
            case "div":
                return np.divide(arguments[0], arguments[1])
        return ELEMENTWISE[expr.op](*arguments)

    def random(self, expr: Expr, bounds: list[Any], index: Array) -> Any:
        """Return the random numbers of the elements that are being evaluated."""
        low, high = bounds
        if expr.type.is_float:
            return low + philox.uniform(self.seed, index.size, expr.value) * (high - low)
        span = (np.asarray(high, np.int64) - low).astype(np.uint64)
        words = philox.words(self.seed, index.size, expr.value).astype(np.uint64)
        return (low + (words * span >> np.uint64(32)).astype(np.int64)).astype(np.int32)

    def reduce(self, statement: Reduce, values: Array) -> Any:
        """Return one value for a whole vector."""
        if values.size == 0:
            return values.dtype.type(0)
        if statement.reducer == "fold":
            assert statement.combine is not None
            return self._fold(statement.combine, values)
        return reduce_values(values, statement.reducer)

    def _fold(self, combine: Expr, values: Array) -> Any:
        """Combine the halves of the vector until one element is left."""
        while values.size > 1:
            half = values.size // 2
            rest = values[2 * half :]
            known: dict[int, Any] = {}
            for node in _operands(combine):
                known[id(node)] = values[:half] if node.value == 0 else values[half : 2 * half]
            combined = np.asarray(self._value(combine, np.arange(half, dtype=np.int32), known), values.dtype)
            values = np.concatenate([np.broadcast_to(combined, (half,)), rest])
        return values[0]

    def apply(self, statement: Apply) -> Array:
        """Run a whole-vector operator."""
        operator = self.operators[statement.operator]
        vectors = [self.vectors[name] for name in statement.vectors]
        scalars = [self.value(scalar) for scalar in statement.scalars]
        extra = [self.seed, statement.stream] if operator.draws else []
        return np.ascontiguousarray(operator.numpy(*vectors, *scalars, *extra)).astype(statement.element.storage)


def _operands(expr: Expr) -> list[Expr]:
    return [node for node in walk(expr) if node.op == "operand"]


def evaluate_static(expr: Expr, numel: int, arguments: Mapping[str, Any]) -> Any:
    """Return the value of an expression of parameters and the gradient's size alone (`is_static`)."""
    machine = Machine(arguments, 0, FUNCTIONS, OPERATORS)
    machine.counts[GRADIENT] = numel
    return machine.value(expr)


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
