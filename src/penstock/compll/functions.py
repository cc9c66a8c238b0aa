"""Element functions: what a compressor may call on scalars, each with its meaning and its two lowerings.

A new one is registered with `operators.register`, or handed to `compile_source` in a larger table:

    cube = Function("cube", 1, FLOAT, numpy=lambda x: x * x * x,
                    numba="def cube(x):\\n    return x * x * x\\n", triton="def cube(x):\\n    return x * x * x\\n")
    compile_source(text, functions=FUNCTIONS | {"cube": cube})

`numba` and `triton` are source of one Python function of that name; the back end decorates it. All three must agree to
the bit: single precision, each operation rounded, nothing fused.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from penstock.compll.types import FLOAT, INT32, SCALARS, Scalar


@dataclass(frozen=True, slots=True)
class Function:
    """A function of scalars."""

    name: str
    arity: int
    argument: Scalar | None  # what its arguments are brought to; None: float if any of them is, else int32
    numpy: Callable[..., Any]  # the meaning, on arrays of any shape
    numba: str
    triton: str
    result: Scalar | None = None  # None: as the arguments
    bounds: Callable[..., tuple[int, int]] | None = None  # range of an integer result from (low, high) of each argument
    reduces: bool = False  # whether `reduce` takes it as a reducer

    @property
    def text(self) -> str:
        """All that kernels depend on, as text: what it is written in, and what it takes and returns."""
        return "\n".join(str(getattr(self, each.name)) for each in fields(self) if each.name not in ("numpy", "bounds"))


def _lines(name: str, arguments: str, body: str) -> str:
    return f"def {name}({arguments}):\n    return {body}\n"


def _float_function(name: str, meaning: Callable[..., Any], numba: str, triton: str) -> Function:
    return Function(name, 1, FLOAT, meaning, _lines(name, "x", numba), _lines(name, "x", triton))


def _abs_bounds(x: tuple[int, int]) -> tuple[int, int]:
    return (0 if x[0] <= 0 <= x[1] else min(abs(x[0]), abs(x[1]))), max(abs(x[0]), abs(x[1]))


def _half_bits(x: Any) -> Any:
    return np.asarray(x, np.float32).astype(np.float16).view(np.uint16)


def _half_value(x: Any) -> Any:
    return np.asarray(x, np.uint16).view(np.float16).astype(np.float32)


# Triton has no such function of its own; x * 0 keeps the sign of a zero.
_ROUND_IN_TRITON = """def round(x):
    below = tl.floor(x)
    odd = below - 2.0 * tl.floor(below * 0.5) != 0.0
    nearest = tl.where((x - below > 0.5) | ((x - below == 0.5) & odd), below + 1.0, below)
    return tl.where(nearest == 0.0, x * 0.0, nearest)
"""

_FUNCTIONS = (
    Function(
        "abs", 1, None, np.abs, _lines("abs", "x", "np.abs(x)"), _lines("abs", "x", "tl.abs(x)"), bounds=_abs_bounds
    ),
    _float_function("floor", np.floor, "np.floor(x)", "tl.floor(x)"),
    _float_function("ceil", np.ceil, "np.ceil(x)", "tl.ceil(x)"),
    _float_function("sqrt", np.sqrt, "np.sqrt(x)", "tl.sqrt_rn(x)"),
    # round: to the nearest integer, ties to the even one, as IEEE does
    Function("round", 1, FLOAT, np.rint, _lines("round", "x", "np.rint(x)"), _ROUND_IN_TRITON),
    Function(
        "smaller", 2, None, lambda a, b: np.where(b < a, b, a),
        _lines("smaller", "a, b", "b if b < a else a"), _lines("smaller", "a, b", "tl.where(b < a, b, a)"),
        bounds=lambda a, b: (min(a[0], b[0]), min(a[1], b[1])), reduces=True,
    ),
    Function(
        "greater", 2, None, lambda a, b: np.where(b > a, b, a),
        _lines("greater", "a, b", "b if b > a else a"), _lines("greater", "a, b", "tl.where(b > a, b, a)"),
        bounds=lambda a, b: (max(a[0], b[0]), max(a[1], b[1])), reduces=True,
    ),
    Function(
        "bits", 1, FLOAT, lambda x: np.asarray(x, np.float32).view(np.int32),
        _lines("bits", "x", "float_bits(x)"), _lines("bits", "x", "x.to(tl.int32, bitcast=True)"),
        result=INT32, bounds=lambda x: (INT32.low, INT32.high),
    ),
    Function(
        "from_bits", 1, INT32, lambda x: np.asarray(x, np.int32).view(np.float32),
        _lines("from_bits", "x", "bits_float(x)"), _lines("from_bits", "x", "x.to(tl.float32, bitcast=True)"),
        result=FLOAT,
    ),
    Function(
        "half", 1, FLOAT, _half_bits, _lines("half", "x", "half_bits(x)"),
        _lines("half", "x", "x.to(tl.float16).to(tl.uint16, bitcast=True)"),
        result=SCALARS["uint16"], bounds=lambda x: (0, 0xFFFF),
    ),
    Function(
        "from_half", 1, SCALARS["uint16"], _half_value, _lines("from_half", "x", "half_value(x)"),
        _lines("from_half", "x", "x.to(tl.float16, bitcast=True).to(tl.float32)"), result=FLOAT,
    ),
)  # fmt: skip
FUNCTIONS = {function.name: function for function in _FUNCTIONS}
