"""Expressions of the source become expressions and vectors of the IR; `statements.py` does the same for bodies.

`extract` reads the compressed bytes in the order and with the types that `concat` wrote them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import count

from penstock.compll.frontend import scalar_ops, syntax
from penstock.compll.frontend.scope import Compressed, ParamsRef, Scope, Value, VectorRef, Writer, blocks_read, size_of
from penstock.compll.frontend.statements import choose, inline
from penstock.compll.frontend.vector_operators import OPERATIONS, apply
from penstock.compll.functions import Function
from penstock.compll.ir import GRADIENT, Expr, Field, Layout, Length, Read
from penstock.compll.operators import Operator
from penstock.compll.types import FLOAT, INT32, SCALARS, ByBlock, Scalar, Type, Vector
from penstock.errors import CompileError

MOST_WORK = 3_000  # expressions; the longest program shipped has 443, thirty functions that double would have 2^30


@dataclass(frozen=True, slots=True)
class Unit:
    """What all functions of a program share."""

    source: syntax.Source
    functions: Mapping[str, syntax.Function]  # the program's own
    builtins: Mapping[str, Function]
    operators: Mapping[str, Operator]
    parameters: Mapping[str, Mapping[str, Expr]]  # by param block and field
    work: "count[int]" = field(default_factory=count)  # expressions elaborated so far


@dataclass(slots=True)
class Evaluator:
    """Elaborates one procedure: `encode`, `decode`, or a function on its own to check it."""

    unit: Unit
    globals: Scope
    writer: Writer = field(default_factory=Writer)
    layout: Layout | None = None  # what encode wrote, for decode to read
    expected: dict[int, Expr] = field(default_factory=dict)  # fields whose value decode knows beforehand
    packed: tuple[tuple[Field, ...], tuple[Expr | str, ...]] | None = None  # what concat wrote
    read: int = 0  # fields extracted so far
    inlining: list[str] = field(default_factory=list)
    over: Length | None = None  # what the function at hand is mapped over; None in a body

    # Errors

    def error(self, node: syntax.Node, problem: str, advice: str) -> CompileError:
        """Return an error that points at `node`."""
        return self.unit.source.error(node.at, problem, advice)

    def unknown(self, node: syntax.Node, name: str, known: Sequence[str], what: str) -> CompileError:
        """Return the error for an undeclared name."""
        close = get_close_matches(name, list(known), 1)
        advice = (
            f"did you mean {close[0]!r}?" if close else f"declare it, or use one of {', '.join(sorted(known)[:12])}"
        )
        return self.error(node, f"unknown {what} {name!r}", advice)

    # Types

    def type(self, node: syntax.TypeName) -> Type:
        """Return the type a program writes; `uint<width>` needs a constant width."""
        scalar = SCALARS[node.name] if node.width is None else self._uint(node.width)
        if node.block is not None:
            block = self.block(node.block, Scope())
            return ByBlock(scalar, block) if block else scalar
        return Vector(scalar) if node.is_vector else scalar

    def block(self, node: syntax.Expression, scope: Scope) -> int:
        """Return the number of elements in a block, a constant; 0 stands for one block that holds everything."""
        size = self.scalar(node, scope)
        if size.op != "const" or size.type.is_float or size.value < 0:
            raise self.error(
                node, "the size of a block is not a constant of 0 or more", "write a number, or a uintN parameter"
            )
        return int(size.value)

    def _uint(self, node: syntax.Expression) -> Scalar:
        width = self.scalar(node, Scope())
        if width.op != "const" or f"uint{width.value}" not in SCALARS:
            found = width.value if width.op == "const" else "not a constant"
            raise self.error(node, f"the width is {found}", "use 1, 2, 4, 8 or 16, or a uint8 parameter that is one")
        return SCALARS[f"uint{width.value}"]

    # Expressions

    def scalar(self, node: syntax.Expression, scope: Scope, want: Type | None = None) -> Expr:
        """Return the scalar an expression stands for."""
        value = self.value(node, scope, want)
        if isinstance(value, Expr):
            return value
        if isinstance(value, VectorRef) and value.by_block:
            return self._of_block(node, value)
        if isinstance(value, VectorRef):
            raise self.error(
                node, f"{value.type.name} is a vector, and a scalar is wanted", "index it, reduce it, or map"
            )
        raise self.error(node, "this is not a value", "use one of its members")

    def _of_block(self, node: syntax.Expression, value: VectorRef) -> Expr:
        """Return a value by block where one is wanted: that of the element at hand, or in a body that of each block."""
        found = value.of_block(self.over or value.length)
        if found is None:
            problem = f"there is one value for {value.length} here, and the vectors at hand are those of {self.over}"
            raise self.error(node, problem, "map over the gradient, or over values of as many blocks")
        return found

    def refuse_by_block(self, node: syntax.Node, expr: Expr) -> None:
        """Refuse a value that there is one of for each block, where one for the whole gradient is wanted."""
        if self.over is None and blocks_read(expr):
            raise self.error(node, "there is one value for each block here", "assign it to a variable such as float[n]")

    def vector(self, node: syntax.Expression, scope: Scope) -> VectorRef:
        """Return the vector an expression stands for."""
        value = self.value(node, scope)
        if isinstance(value, VectorRef):
            return value
        found = value.type.name if isinstance(value, Expr) else "not a vector"
        raise self.error(node, f"a vector is wanted here, and this is {found}", "hand over a vector such as gradient")

    def value(self, node: syntax.Expression, scope: Scope, want: Type | None = None, hint: str = "") -> Value:
        """Return what an expression stands for; `want` is the type it will be stored in, `hint` its name."""
        if next(self.unit.work) > MOST_WORK:
            problem = (
                f"the program has more than {MOST_WORK} expressions once its functions are put in where they are called"
            )
            raise self.error(node, problem, "assign what is used twice to a variable")
        try:
            return self._value(node, scope, want, hint)
        except scalar_ops.OperandError as error:
            raise self.error(node, *error.args) from None

    def _value(self, node: syntax.Expression, scope: Scope, want: Type | None, hint: str) -> Value:
        match node:
            case syntax.Number():
                return self._number(node)
            case syntax.Name():
                return self._name(node, scope)
            case syntax.Member():
                return self._member(node, scope)
            case syntax.At():
                return self._at(node, scope, hint)
            case syntax.Prefix():
                operand = self.scalar(node.operand, scope)
                return scalar_ops.negate(operand) if node.operator == "-" else _not(scalar_ops.truth(operand))
            case syntax.Infix():
                return scalar_ops.binary(node.operator, self.scalar(node.left, scope), self.scalar(node.right, scope))
            case syntax.Choose():
                condition = scalar_ops.truth(self.scalar(node.condition, scope))
                return choose(condition, self.scalar(node.yes, scope), self.scalar(node.no, scope))
            case syntax.Cast():
                return self._cast(node, scope)
            case syntax.Call():
                return self._call(node, scope, want, hint)

    def _number(self, node: syntax.Number) -> Expr:
        if isinstance(node.value, float):
            found = scalar_ops.real(node.value)
            if not math.isfinite(found.value):
                raise self.error(node, "the number does not fit a float", "use at most 3.4028235e38")
            return found
        if node.value > INT32.high:
            raise self.error(node, f"{node.value} does not fit int32", f"use at most {INT32.high}")
        return scalar_ops.integer(node.value)

    def _name(self, node: syntax.Name, scope: Scope) -> Value:
        slot = scope.find(node.name) or self.globals.find(node.name)
        if slot is None and node.name in self.unit.parameters:
            return ParamsRef(node.name)
        if slot is None:
            known = [*scope.names(), *self.globals.names(), *self.unit.parameters]
            raise self.unknown(node, node.name, known, "name")
        if slot.value is None:
            raise self.error(node, f"{node.name!r} has no value yet", "assign it before this line")
        return slot.value

    def _member(self, node: syntax.Member, scope: Scope) -> Expr:
        value = self.value(node.value, scope)
        if isinstance(value, ParamsRef):
            fields = self.unit.parameters[value.block]
            if node.member not in fields:
                raise self.unknown(node, node.member, list(fields), f"parameter of {value.block}:")
            return fields[node.member]
        if isinstance(value, VectorRef) and node.member == "size":
            return size_of(value.length)
        found = value.type.name if isinstance(value, Expr | VectorRef) else "compressed"
        raise self.error(node, f"{found} has no member {node.member!r}", "vectors have .size, params their parameters")

    def _at(self, node: syntax.At, scope: Scope, hint: str) -> Value:
        vector, index = self.vector(node.vector, scope), self.value(node.index, scope)
        if isinstance(index, VectorRef):
            if index.element.is_float:
                raise self.error(node.index, "an index is an integer, and this is float*", "index with int32*")
            at = Expr("at", vector.element, (scalar_ops.widen(index.at_i()),), vector.name, vector.low, vector.high)
            return self.writer.map(hint or "gather", index.length, at)
        assert isinstance(index, Expr)
        if index.type.is_float:
            raise self.error(node.index, "an index is an integer, and this is a float", "cast it: (int32) x")
        return Expr("at", vector.element, (scalar_ops.widen(index),), vector.name, vector.low, vector.high)

    def _cast(self, node: syntax.Cast, scope: Scope) -> Expr:
        target = self.type(node.type)
        if not isinstance(target, Scalar):
            raise self.error(node, "a vector cannot be cast", "map a function over it that casts its elements")
        return scalar_ops.convert(self.scalar(node.operand, scope), target, explicit=True)

    # Calls

    def _call(self, node: syntax.Call, scope: Scope, want: Type | None, hint: str) -> Value:
        if node.function == "extract":
            return extract(self, node, scope, want, hint)
        if node.function in OPERATIONS:
            return OPERATIONS[node.function](self, node, scope, hint)
        if node.function in self.unit.operators:
            return apply(self, node, scope, hint, self.unit.operators[node.function])
        self.arity(node.function, node)  # raises for an unknown function, before its arguments are evaluated
        arguments = [self.scalar(argument, scope) for argument in node.arguments]
        return self.call(node, node.function, arguments)

    def arity(self, name: str, node: syntax.Node) -> int:
        """Return the number of arguments of a function of scalars."""
        if name in self.unit.functions:
            return len(self.unit.functions[name].arguments)
        if name in self.unit.builtins:
            return self.unit.builtins[name].arity
        known = [*self.unit.functions, *self.unit.builtins, *self.unit.operators, *OPERATIONS, "extract"]
        raise self.unknown(node, name, known, "function")

    def call_over(self, length: Length, node: syntax.Name, operands: Sequence[VectorRef]) -> Expr:
        """Return a function applied to element i of vectors of one length."""
        outer, self.over = self.over, length
        made = self.call(node, node.name, [operand.at_i() for operand in operands])
        self.over = outer
        return made

    def call(self, node: syntax.Node, name: str, arguments: Sequence[Expr]) -> Expr:
        """Return a function of scalars applied: the program's own inlined, a built-in as a call."""
        wanted = self.arity(name, node)
        if wanted != len(arguments):
            text = f"{name} takes {wanted} argument{'s' * (wanted != 1)} and is given {len(arguments)}"
            raise self.error(node, text, "hand over as many as it declares")
        if name in self.unit.functions:
            return inline(self, node, self.unit.functions[name], arguments)
        return self._builtin(self.unit.builtins[name], arguments)

    def _builtin(self, function: Function, arguments: Sequence[Expr]) -> Expr:
        target = function.argument
        if target is None:
            target = FLOAT if any(argument.type.is_float for argument in arguments) else INT32
        brought = tuple(scalar_ops.convert(argument, target) for argument in arguments)
        result = function.result or target
        low, high = result.low, result.high
        if function.bounds and not result.is_float:
            low, high = function.bounds(*((argument.low, argument.high) for argument in brought))
        return Expr("call", result, brought, function.name, low, high)


def _not(condition: Expr) -> Expr:
    return Expr("not", condition.type, (condition,))


def extract(e: "Evaluator", node: syntax.Call, scope: Scope, want: Type | None, hint: str) -> Value:
    """Return the next field of the compressed bytes; its type must be what concat put there."""
    if node.template:
        want = SCALARS[node.template]
    if e.layout is None:
        raise e.error(node, "extract reads compressed bytes, which only decode has", "move it to decode")
    if len(node.arguments) != 1 or not isinstance(e.value(node.arguments[0], scope), Compressed):
        raise e.error(node, "extract takes the compressed bytes", "write extract(compressed)")
    if want is None:
        raise e.error(node, "extract needs to know the type", "assign it to a variable, or extract<uint8>(...)")
    fields = e.layout.fields
    while e.read < len(fields) and fields[e.read].counts:
        e.read += 1
    if e.read == len(fields):
        raise e.error(node, "everything that concat wrote is read already", "remove this extract, or concat more")
    number, e.read = e.read, e.read + 1
    return _field(e, node, number, fields[number], want, hint)


def _field(e: "Evaluator", node: syntax.Call, number: int, written: Field, want: Type, hint: str) -> Value:
    held = Vector(want.element) if isinstance(want, ByBlock) else want
    fits = not isinstance(want, ByBlock) or written.length == Length(GRADIENT, want.block)
    if written.type != held or not fits:
        problem = f"extract reads {want.name} where concat wrote {written.name!r}, a {written.type.name}"
        raise e.error(node, problem, "read what concat wrote, in its order")
    if not isinstance(want, Scalar):
        assert written.length is not None
        name = e.writer.fresh(hint or written.name)
        e.writer.statements.append(Read(name, number, want.element, written.length))
        low, high = want.element.low, want.element.high
        return VectorRef(name, want.element, written.length, low, high, isinstance(want, ByBlock))
    if number in e.expected:
        return e.expected[number]
    return Expr("field", want, value=number, low=want.low, high=want.high)
