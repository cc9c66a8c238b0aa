"""Generates the numba kernels of a program as readable Python: one module, a function for each kernel."""

from collections.abc import Mapping

from penstock.compll.backends.numba.arguments import ARGUMENTS
from penstock.compll.backends.numba.expr import Names
from penstock.compll.backends.numba.kernel import KernelWriter
from penstock.compll.backends.numba.many import INSIDE, loop_source
from penstock.compll.functions import Function
from penstock.compll.ir import GRADIENT, RESIDUAL, Apply, Program, called
from penstock.compll.lower.fuse import schedule_decode, schedule_encode, schedule_later
from penstock.compll.lower.passes import TOTAL, Schedule
from penstock.compll.operators import Operator

HEAD = '''"""{title}

Generated from {name}.cll by penstock's numba back end; change the algorithm, not this file.
"""

import numpy as np
from numba import float32, float64, int32, int64, njit, uint8, uint16, uint32, uint64

from penstock.compll.backends.numba.support import *

'''
KINDS = ("encode", "encode_feedback", "encode_later", "decode", "decode_add")


def generate(
    program: Program,
    functions: Mapping[str, Function],
    operators: Mapping[str, Operator],
    kinds: tuple[str, ...] = KINDS,
) -> str:
    """Return the source of a module with the kernels of a program, those that it has."""
    kinds = tuple(kind for kind in kinds if kind != "encode_later" or schedule_later(program) is not None)
    constants = [f"{item.name} = {item.value}" for item in program.parameters if item.is_constant]
    title = f"{program.name}" + (f" with {', '.join(constants)}" if constants else "") + "."
    text = HEAD.format(title=title, name=program.name)
    schedules = {INSIDE.get(kind, kind): _schedule(program, INSIDE.get(kind, kind)) for kind in kinds}
    text += _lowerings(program, schedules, functions, operators)
    reserved = frozenset(functions) | frozenset(operators) | _support_names()
    for kind in kinds:
        inside = INSIDE.get(kind, kind)
        kernel = _kernel(program, inside, schedules[inside], reserved, operators)
        text += f"\n{kernel}" if kind == inside else f"\n\n@helper{kernel}\n{loop_source(kind, _own(program))}"
    return text


def _own(program: Program) -> list[str]:
    names = Names(frozenset({"boundaries", "sizes", "calls", "place", "segment", *INSIDE.values()}))
    return [names.of(parameter.name) for parameter in program.arguments]


def _schedule(program: Program, kind: str) -> Schedule:
    if kind == "encode_later":
        later = schedule_later(program)
        assert later is not None, f"{program.name} has nothing to put off"
        return later
    if kind.startswith("encode"):
        return schedule_encode(program, feedback=kind == "encode_feedback")
    return schedule_decode(program)


def _lowerings(
    program: Program,
    schedules: Mapping[str, Schedule],
    functions: Mapping[str, Function],
    operators: Mapping[str, Operator],
) -> str:
    """Return the functions and operators that the kernels call."""
    sources: dict[str, str] = {}
    for schedule in schedules.values():
        for step in schedule.steps:
            if isinstance(step, Apply):
                sources[step.operator] = operators[step.operator].numba
    for name in called(program)[0]:
        sources[name] = functions[name].numba
    return "".join(f"\n@helper\n{source}\n" for _, source in sorted(sources.items()))


def _support_names() -> frozenset[str]:
    from penstock.compll.backends.numba import support

    return frozenset(name for name in vars(support) if not name.startswith("_"))


def _kernel(
    program: Program, kind: str, schedule: Schedule, reserved: frozenset[str], operators: Mapping[str, Operator]
) -> str:
    names = Names(reserved, {GRADIENT: GRADIENT, RESIDUAL: RESIDUAL, TOTAL: RESIDUAL})  # where the total is kept
    writer = KernelWriter(program, schedule, names, operators, kind == "decode_add", kind == "encode_later")
    own = [writer.names.of(parameter.name) for parameter in program.arguments]
    arguments = ", ".join([*ARGUMENTS[kind], *own])
    if kind.startswith("encode"):
        writer.encode(later=kind == "encode_later")
    else:
        writer.decode()
    return f"\ndef {kind}({arguments}):\n" + "\n".join(writer.lines) + "\n"
