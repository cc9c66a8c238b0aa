"""Scalar expressions: operands converted to one type, constants folded, ranges of integers computed."""

import math
import operator
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from penstock.compll.ir import Expr
from penstock.compll.types import BOOL, FLOAT, INT32, Scalar

INT_LOW, INT_HIGH = INT32.low, INT32.high
COMPARISONS = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}
ARITHMETIC = {"+": "add", "-": "sub", "*": "mul", "/": "div"}
ORDER: dict[str, Callable[[int, int], bool]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip
INTEGER_ONLY = {"%": "mod", "<<": "shl", ">>": "shr", "&": "and", "|": "or", "^": "xor"}


class OperandError(Exception):
    """What is wrong with operands, as (problem, advice); the front end adds where."""


def integer(value: int) -> Expr:
    """Return an int32 constant."""
    return Expr("const", INT32, value=value, low=value, high=value)


def real(value: float) -> Expr:
    """Return a float constant, rounded to single precision; infinity where it is too large for that."""
    with np.errstate(over="ignore"):
        return Expr("const", FLOAT, value=float(np.float32(value)))


def truth(expr: Expr) -> Expr:
    """Return the condition `expr != 0`."""
    if expr.type is BOOL:
        return expr
    if expr.type.is_float:
        raise OperandError("a float is not a condition", "compare it, as in x != 0")
    return compare("ne", expr, integer(0))


def widen(expr: Expr) -> Expr:
    """Return an integer or condition as int32, a float as it is."""
    if expr.type.is_float or expr.type is INT32:
        return expr
    if expr.op == "const":
        return integer(expr.value)
    low, high = (0, 1) if expr.type is BOOL else (expr.low, expr.high)
    return Expr("cast", INT32, (expr,), low=low, high=high)


def to_float(expr: Expr) -> Expr:
    """Return any scalar as float."""
    if expr.type.is_float:
        return expr
    expr = widen(expr)
    return real(expr.value) if expr.op == "const" else Expr("cast", FLOAT, (expr,))


def common(left: Expr, right: Expr) -> tuple[Expr, Expr]:
    """Return both operands as float if either is, else as int32."""
    if left.type.is_float or right.type.is_float:
        return to_float(left), to_float(right)
    return widen(left), widen(right)


def convert(expr: Expr, target: Scalar, explicit: bool = False) -> Expr:
    """Return `expr` as `target`; an integer that might not fit is an error unless the cast is explicit."""
    if expr.type == target:
        return expr
    if target.is_float:
        return to_float(expr)
    if expr.type.is_float:
        return Expr("cast", target, (expr,), low=target.low, high=target.high, name=expr.name)
    if expr.type is BOOL and target is not INT32:
        return Expr("cast", target, (expr,), low=0, high=1, name=expr.name)
    expr = widen(expr)
    if expr.low < target.low or expr.high > target.high:
        if not explicit:
            raise OperandError(
                f"the value can be {expr.low} to {expr.high}, and {target.name} holds {target.low} to {target.high}",
                f"use % {target.high + 1}, or a wider type",
            )
        return Expr("cast", target, (expr,), low=target.low, high=target.high)
    if target is INT32:
        return expr
    if expr.op == "const":
        return Expr("const", target, value=expr.value, low=expr.low, high=expr.high)
    return Expr("cast", target, (expr,), low=expr.low, high=expr.high, name=expr.name)


def compare(op: str, left: Expr, right: Expr) -> Expr:
    """Return a comparison; of two integer constants, a constant."""
    left, right = common(left, right)
    if left.op == right.op == "const" and not left.type.is_float:
        return Expr("const", BOOL, value=ORDER[op](left.value, right.value))
    return Expr(op, BOOL, (left, right))


def select(condition: Expr, yes: Expr, no: Expr) -> Expr:
    """Return `yes` where the condition holds and `no` elsewhere."""
    if yes.type is not BOOL or no.type is not BOOL:
        yes, no = common(yes, no)
    if condition.op == "const":
        return yes if condition.value else no
    return Expr("select", yes.type, (condition, yes, no), low=min(yes.low, no.low), high=max(yes.high, no.high))


def negate(expr: Expr) -> Expr:
    """Return `-expr`."""
    expr = widen(expr)
    if expr.op == "const":
        return real(-expr.value) if expr.type.is_float else integer(-expr.value)
    low, high = _held(-expr.high, -expr.low)
    return Expr("neg", expr.type, (expr,), low=low, high=high)


def binary(symbol: str, left: Expr, right: Expr) -> Expr:
    """Return `left symbol right` for any infix operator of the language."""
    if symbol in ("&&", "||"):
        return Expr("land" if symbol == "&&" else "lor", BOOL, (truth(left), truth(right)))
    if symbol in COMPARISONS:
        return compare(COMPARISONS[symbol], left, right)
    left, right = common(left, right)
    if symbol in INTEGER_ONLY and left.type.is_float:
        raise OperandError(f"{symbol} works on integers, and an operand is a float", "cast it: (int32) x")
    op = ARITHMETIC.get(symbol) or INTEGER_ONLY[symbol]
    if left.type.is_float:
        return _fold_float(op, left, right)
    if op in ("div", "mod") and right.low <= 0 <= right.high:
        raise OperandError("the divisor can be 0", "keep it above 0: greater(x, 1)")
    if op in ("shl", "shr") and not 0 <= right.low <= right.high <= 31:
        raise OperandError(f"the shift can be {right.low} to {right.high}", "shift by 0 to 31")
    return _integer(op, left, right)


def _fold_float(op: str, left: Expr, right: Expr) -> Expr:
    if left.op == right.op == "const":
        with np.errstate(all="ignore"):
            a, b = np.float32(left.value), np.float32(right.value)
            value = {"add": a + b, "sub": a - b, "mul": a * b, "div": np.divide(a, b)}[op]
        if math.isfinite(value):
            return real(float(value))
    return Expr(op, FLOAT, (left, right))


def _integer(op: str, left: Expr, right: Expr) -> Expr:
    if left.op == right.op == "const":
        return integer(wrap(EXACT[op](left.value, right.value)))
    low, high = _range(op, left, right)
    return Expr(op, INT32, (left, right), low=low, high=high)


def wrap(value: int) -> int:
    """Return the low 32 bits of an integer, as int32 holds them.

    >>> wrap(1 << 31)
    -2147483648
    """
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def _cut(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


EXACT: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _cut,
    "mod": lambda a, b: a - b * _cut(a, b),
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}


def _held(low: int, high: int) -> tuple[int, int]:
    """Return the range, or all of int32 where it wraps."""
    return (low, high) if low >= INT_LOW and high <= INT_HIGH else (INT_LOW, INT_HIGH)


def _range(op: str, left: Expr, right: Expr) -> tuple[int, int]:
    """Return bounds on an integer operation from the bounds of its operands."""
    if op == "mod":
        largest = max(abs(right.low), abs(right.high)) - 1
        low = 0 if left.low >= 0 else -min(largest, -left.low)
        return low, max(0, min(largest, left.high))
    if op in ("or", "xor"):
        if left.low < 0 or right.low < 0:
            return INT_LOW, INT_HIGH
        return 0, (1 << max(left.high.bit_length(), right.high.bit_length())) - 1
    if op == "and":
        nonnegative = [side.high for side in (left, right) if side.low >= 0]
        return (0, min(nonnegative)) if nonnegative else (INT_LOW, INT_HIGH)
    corners = [EXACT[op](a, b) for a in (left.low, left.high) for b in (right.low, right.high)]
    return _held(min(corners), max(corners))


def named(expr: Expr, name: str) -> Expr:
    """Return the same value under the name the source gives it."""
    return expr if expr.op in ("const", "param", "name", "element", "field") else replace(expr, name=name)
