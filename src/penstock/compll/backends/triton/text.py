"""Pieces of Triton source that need no context: constants, casts, heads of functions."""

import keyword
import textwrap
from collections.abc import Sequence

from penstock.compll.ir import Expr
from penstock.compll.types import BOOL, Kind, Scalar

INFIX = {
    "add": "+", "sub": "-", "mul": "*", "mod": "%", "shl": "<<", "shr": ">>", "and": "&", "or": "|", "xor": "^",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "land": "&", "lor": "|",
}  # fmt: skip
# What generated code says itself; a program's own names step aside.
RESERVED = {
    *keyword.kwlist, "min", "max", "sum", "abs", "range", "float", "int", "load", "store", "words", "uniform", "below",
    "partial", "block", "size", "full", "i", "tl", "triton", "numel", "seed", "factor", "positions", "inside", "worst",
    "latest", "kept", "valid", "start", "word", "on", "wrong", "index", "whole",
}  # fmt: skip
KINDS = {"numel": "i32", "seed": "u64", "factor": "fp32", "units": "i32", "nbytes": "i64"}  # besides pointers
LIMITS = {"smaller": ('float("inf")', "2147483647"), "greater": ('float("-inf")', "-2147483648")}


def literal(expr: Expr) -> str:
    """Return a constant as source; floats are exact in single precision."""
    if not expr.type.is_float:
        return str(int(expr.value))
    text = repr(float(expr.value))
    return f'float("{text}")' if text in ("inf", "-inf", "nan") else text


def register(scalar: Scalar) -> str:
    """Return the type of a scalar in registers: integers of every width share int32."""
    return "tl.float32" if scalar.is_float else "tl.int32"


def tensor(expr: Expr, text: str) -> str:
    """Return an operand as Triton takes it where a Python number will not do."""
    return f"tl.full([], {text}, {register(expr.type)})" if expr.op == "const" else text


def cast(text: str, expr: Expr) -> str:
    """Return a conversion; between integers most are nothing."""
    source, target = expr.args[0].type, expr.type
    if target.is_float:
        return f"{tensor(expr.args[0], text)}.to(tl.float32)"
    if source.is_float:
        return f"to_uint({text}, {target.high})" if target.kind is Kind.UINT else f"to_int({text})"
    if source is BOOL:
        return f"{text}.to(tl.int32)"
    inner = expr.args[0]
    return text if target.low <= inner.low and inner.high <= target.high else f"({text} & {target.high})"


def limit(reducer: str, is_float: bool) -> str:
    """Return where a search for the smallest or the greatest starts."""
    return LIMITS[reducer][0 if is_float else 1]


def wrapped(name: str, arguments: Sequence[str]) -> list[str]:
    """Return the lines of a function's head."""
    text = ", ".join(argument.replace(": ", ":_") for argument in arguments)  # a line ends between arguments
    lines = [line.replace(":_", ": ") for line in textwrap.wrap(text, 110, break_long_words=False)]
    return [f"def {name}(", *(f"    {line}" for line in lines), "):"]


def argument_kind(argument: str) -> str:
    """Return the type an argument is declared to have; pointers have none."""
    if argument.endswith("_ptr"):
        return ""
    return KINDS.get(argument) or ("fp32" if argument.startswith("float_") else "i32")
