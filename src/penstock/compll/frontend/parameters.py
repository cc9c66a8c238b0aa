"""The parameters of a compressor: defaults, what each may be, and which are constants of the generated code.

A `uintN` parameter is a constant: it may be the width of a type, and a program is compiled anew for each of its values.
A `float` or `int32` parameter is an argument of the kernels and costs nothing to change (warm-up changes densities).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.compll.ir import Expr, Parameter, Program
from penstock.compll.types import SCALARS, Kind, Scalar
from penstock.errors import CodecError, did_you_mean

if TYPE_CHECKING:  # a program taken from the cache needs no parser
    from penstock.compll.frontend import syntax

LARGEST = float(np.finfo(np.float32).max)  # of a parameter: kernels take float32 and int32
_SMALLEST = float(np.finfo(np.float32).smallest_subnormal)  # that is not 0


def specialise(tree: "syntax.Tree", chosen: Mapping[str, int | float]) -> dict[str, Parameter]:
    """Return the parameters of a program by name, the constant ones with their value."""
    parameters: dict[str, Parameter] = {}
    for block in tree.params:
        for field in block.fields:
            if field.name in parameters:
                raise tree.source.error(field.at, f"{field.name!r} is declared twice", "rename one of them")
            parameters[field.name] = _parameter(tree.source, field, chosen)
    for name in chosen:
        if name not in parameters:
            known = ", ".join(parameters) or "none"
            near = did_you_mean(name, parameters)
            raise CodecError(f"{tree.source.path}: unknown parameter {name!r}; its parameters: {known}{near}")
    return parameters


def _parameter(source: "syntax.Source", field: "syntax.Field", chosen: Mapping[str, int | float]) -> Parameter:
    if field.type.is_vector or field.type.width is not None:
        raise source.error(field.type.at, "a parameter is one number", "use uint8, int32 or float")
    made = Parameter(field.name, SCALARS[field.type.name], field.default, field.choices, field.interval)
    if problem := _wrong_range(made):
        raise source.error(field.at, f"{field.name!r} may be {problem}", "change what it may be")
    value = chosen.get(field.name, field.default)
    if value is None:
        if not made.is_constant:
            return made
        raise source.error(
            field.at, f"parameter {field.name!r} has no value", f"give it a default, or pass {field.name}"
        )
    if field.default is not None and (problem := misfit(made, field.default)):
        raise source.error(field.at, f"the default of {field.name!r} is {field.default}; wanted {problem}", "change it")
    if problem := misfit(made, value):
        raise CodecError(f"parameter {field.name} is {value}; wanted {problem}")
    return replace(made, value=int(value)) if made.is_constant else made


def _wrong_range(parameter: Parameter) -> str:
    """Return what is wrong with the choices or the range of a parameter, or "": each number must be of its type."""
    for value in (*parameter.choices, *(parameter.interval or ())):
        if wanted := _beyond(parameter.type, value):
            return f"{value}; wanted {wanted}"
    low, high = parameter.interval or (0, 0)
    return "" if low <= high else f"from {low} to {high}; wanted the smaller number first"


def _beyond(scalar: Scalar, value: int | float) -> str:
    """Return what numbers a type holds, for an error message, or "" if `value` is one: of floats, one not lost as 0."""
    if scalar.kind is Kind.FLOAT:
        holds = value == 0 or _SMALLEST <= abs(value) <= LARGEST
        return "" if holds else f"0, or a number of either sign from {_SMALLEST:.2g} to {LARGEST:.8g}, as float32 holds"
    holds = abs(value) <= LARGEST and value == int(value) and scalar.low <= value <= scalar.high
    return "" if holds else f"an integer that {scalar.name} holds"


def misfit(parameter: Parameter, value: int | float) -> str:
    """Return what the parameter accepts, for an error message, or "" if it accepts `value`."""
    if parameter.choices and value not in parameter.choices:
        return f"one of {', '.join(str(choice) for choice in parameter.choices)}"
    low, high = parameter.interval or (-np.inf, np.inf)
    if not low <= value <= high:
        return f"a number from {low} to {high}" if parameter.interval else "a number"
    return _beyond(parameter.type, value)


def parameter_expr(parameter: Parameter) -> Expr:
    """Return a parameter as an expression: a constant, or an argument with its declared range."""
    scalar = parameter.type
    if parameter.value is not None:
        value = int(parameter.value)
        return Expr("const", scalar, value=value, low=value, high=value)
    low, high = _bounds(parameter, scalar)
    return Expr("param", scalar, value=parameter.name, low=low, high=high)


def _bounds(parameter: Parameter, scalar: Scalar) -> tuple[int, int]:
    if scalar.is_float:
        return 0, 0
    if parameter.choices:
        return int(min(parameter.choices)), int(max(parameter.choices))
    return (int(parameter.interval[0]), int(parameter.interval[1])) if parameter.interval else (scalar.low, scalar.high)


def bind_arguments(program: Program, chosen: Mapping[str, int | float]) -> tuple[np.float32 | np.int32, ...]:
    """Return the values of the parameters that kernels take as arguments, checked, in the kernels' order."""
    values: list[np.float32 | np.int32] = []
    for parameter in program.arguments:
        value = chosen.get(parameter.name, parameter.default)
        if value is None:
            raise CodecError(f"{program.name}: parameter {parameter.name} has no value; pass {parameter.name}=...")
        if problem := misfit(parameter, value):
            raise CodecError(f"{program.name}: parameter {parameter.name} is {value}; wanted {problem}")
        values.append(np.float32(value) if parameter.type.is_float else np.int32(value))
    return tuple(values)
