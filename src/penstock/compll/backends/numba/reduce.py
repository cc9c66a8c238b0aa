"""How generated code reduces: floats are compared as integers that sort alike, and summed in single precision within a
block, in double precision over blocks."""

from penstock.compll.backends.numba.expr import constructor
from penstock.compll.ir import GroupReduce, Reduce


def start_value(output: Reduce) -> str:
    """Return where a reduction over all blocks starts."""
    if output.reducer == "sum":
        return "0.0" if output.expr.type.is_float else "int32(0)"
    if output.reducer == "fold":
        return f"{constructor(output.expr.type)}(0)"
    return "int32(2147483647)" if output.reducer == "smaller" else "int32(-2147483648)"


def block_start(output: Reduce) -> str:
    """Return where a reduction over one block starts."""
    return "float32(0)" if output.reducer == "sum" and output.expr.type.is_float else start_value(output)


def step_lines(output: Reduce, name: str, text: str) -> list[str]:
    """Return what takes in one element."""
    if output.reducer == "sum":
        return [f"{name} = add({name}, {text})" if output.expr.type.is_float else f"{name} = int32({name} + {text})"]
    sign = "<" if output.reducer == "smaller" else ">"
    key = f"order_key({text})" if output.expr.type.is_float else text
    return [f"{name}_k = {key}", f"{name} = {name}_k if {name}_k {sign} {name} else {name}"]


def join_lines(output: Reduce, name: str) -> list[str]:
    """Return what takes in one block."""
    if output.reducer == "sum":
        return [f"{name} += float64({name}_b)" if output.expr.type.is_float else f"{name} = int32({name} + {name}_b)"]
    sign = "<" if output.reducer == "smaller" else ">"
    return [f"{name} = {name}_b if {name}_b {sign} {name} else {name}"]


def final_lines(output: Reduce, name: str, size: str) -> list[str]:
    """Return what turns the accumulator into the value."""
    if output.reducer == "fold":
        return []
    if output.reducer == "sum":
        return [f"{name} = float32({name})"] if output.expr.type.is_float else []
    if output.expr.type.is_float:
        return [f"{name} = key_value({name}, {size})"]
    return [f"{name} = {name} if {size} > 0 else int32(0)"]


def group_start(output: GroupReduce) -> str:
    """Return where the reduction of one group starts."""
    if output.reducer == "sum":
        return "0.0" if output.expr.type.is_float else "int32(0)"
    return "int32(2147483647)" if output.reducer == "smaller" else "int32(-2147483648)"


def group_lines(output: GroupReduce, name: str, text: str) -> list[str]:
    """Return what takes one element into a group."""
    if output.reducer == "sum" and output.expr.type.is_float:
        return [f"{name} = add({name}, float64({text}))"]
    return step_lines(Reduce(output.name, output.reducer, output.over, output.expr), name, text)


def group_value(output: GroupReduce, name: str) -> str:
    """Return a group's value."""
    if not output.expr.type.is_float:
        return name
    return f"float32({name})" if output.reducer == "sum" else f"key_value({name}, 1)"
