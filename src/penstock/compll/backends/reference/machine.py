"""Runs the statements of a procedure one by one on numpy arrays."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.compll import philox
from penstock.compll.backends.reference.values import (
    ELEMENTWISE,
    Array,
    cast,
    divide_integers,
    group_reduce,
    read_at,
    reduce_values,
)
from penstock.compll.functions import FUNCTIONS, Function
from penstock.compll.ir import (
    GRADIENT,
    Apply,
    Expr,
    Filter,
    GroupReduce,
    Length,
    Let,
    Map,
    Read,
    Reduce,
    Statement,
    walk,
)
from penstock.compll.lower.payload_layout import size_at
from penstock.compll.operators import OPERATORS, Operator


@dataclass(slots=True)
class Machine:
    """Everything a running procedure knows."""

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
        """Return the random numbers of the elements in sight."""
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
    """Return an expression of parameters and the gradient's size alone."""
    machine = Machine(arguments, 0, FUNCTIONS, OPERATORS)
    machine.counts[GRADIENT] = numel
    return machine.value(expr)
