"""Writes the numba kernels of a program as readable Python: one module, a function for each kernel.

`KernelWriter` writes one of them: passes (`loops.py`) and scalars in the order of the schedule, and payload fields.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from penstock.compll.backends.numba.backend import ARGUMENTS, BODY, COLUMNS, PIECES, PIECES_ARGUMENTS
from penstock.compll.backends.numba.loops import write_passes
from penstock.compll.backends.numba.numba_expr import Body, Names, bare
from penstock.compll.functions import Function
from penstock.compll.ir import (
    GRADIENT,
    RESIDUAL,
    Apply,
    Expr,
    Length,
    Let,
    Program,
    Read,
    Statement,
    called,
    expressions,
    walk,
)
from penstock.compll.lower.fuse import schedule_decode, schedule_encode, schedule_later
from penstock.compll.lower.passes import INPUTS, LAST, TOTAL, Pass, Schedule, Tiled
from penstock.compll.operators import Operator
from penstock.compll.types import Scalar, Vector

HEAD = '''"""{title}

Generated from {name}.cll by penstock's numba back end; change the algorithm, not this file.
"""

import numpy as np
from numba import float32, float64, int32, int64, njit, uint8, uint16, uint32, uint64

from penstock.compll.backends.numba.support import *

'''
KINDS = ("encode", "encode_feedback", "encode_later", "decode", "decode_add")
OF_PIECES = {"piece", "size", "nbytes", "header"}  # identifiers of kernels that go through pieces


def generate(
    program: Program,
    functions: Mapping[str, Function],
    operators: Mapping[str, Operator],
    kinds: tuple[str, ...] = KINDS,
) -> str:
    """Return the source of a module with kernels of a program; `encode_later` only where feedback can be deferred."""
    kinds = tuple(kind for kind in kinds if kind != "encode_later" or schedule_later(program) is not None)
    constants = [f"{item.name} = {item.value}" for item in program.parameters if item.is_constant]
    title = f"{program.name}" + (f" with {', '.join(constants)}" if constants else "") + "."
    text = HEAD.format(title=title, name=program.name)
    schedules = {kind: _schedule(program, kind.removesuffix(PIECES)) for kind in kinds}
    text += _lowerings(program, schedules, functions, operators)
    reserved = frozenset(functions) | frozenset(operators) | _support_names()
    for kind in kinds:
        text += f"\n{_kernel(program, kind, schedules[kind], reserved, operators)}"
    return text


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
    of_one = kind.removesuffix(PIECES)
    arguments = PIECES_ARGUMENTS if kind != of_one else ARGUMENTS[kind]
    taken = reserved | {*arguments, *ARGUMENTS[of_one], *OF_PIECES}
    names = Names(taken, {GRADIENT: GRADIENT, RESIDUAL: RESIDUAL, TOTAL: RESIDUAL})  # where the total is kept
    source = {"decode_add": "out", "decode_add_to": "source"}.get(of_one, "")
    scales = of_one in ("encode_feedback", "encode_later")
    writer = KernelWriter(program, schedule, names, operators, source, scales)
    own = [writer.names.of(parameter.name) for parameter in program.arguments]
    write = partial(writer.encode, later=of_one == "encode_later") if kind.startswith("encode") else writer.decode
    if kind == of_one:
        write()
    else:
        _write_for_pieces(writer, of_one, write)
    return f"\ndef {kind}({', '.join([*arguments, *own])}):\n" + "\n".join(writer.lines) + "\n"


def _write_for_pieces(writer: "KernelWriter", kind: str, write: Callable[[], None]) -> None:
    """Write a loop over the rows of a table with the kernel of one piece inside: it ends at what is not ordinary."""
    writer.refusal = "return piece"
    writer.line("for piece in range(first, table.shape[0]):")
    writer.depth += 1
    writer.line("size, nbytes = table[piece, 0], table[piece, 1]")
    writer.line(f"header = bytes_at(table[piece, {BODY}] - headers.shape[1], headers.shape[1])")
    if not kind.startswith("encode"):
        writer.block("if not same_bytes(header, headers[piece]):", [writer.refusal])
    for name, column in COLUMNS[kind].items():
        is_body = name in ("payload", "last") or (name == "out" and kind.startswith("encode"))
        place = f"bytes_at(table[piece, {column}], nbytes)" if is_body else f"floats_at(table[piece, {column}], size)"
        writer.line(f"{name} = {place}")
    if "factor" in ARGUMENTS[kind]:
        writer.line("factor = factors[piece]")
    if "seed_low" in ARGUMENTS[kind]:
        writer.line("seed_low = uint32(seed + piece)")
    write()
    if kind == "encode_later":
        writer.line("last[:] = out")
    if kind.startswith("encode"):
        writer.line("header[:] = headers[piece]")
    writer.depth -= 1
    writer.line("return table.shape[0]")


@dataclass(slots=True)
class KernelWriter:
    """Writes one kernel."""

    program: Program
    schedule: Schedule
    names: Names
    operators: Mapping[str, Operator]
    source: str = ""  # decode: what the values are added to, instead of being written alone
    scales: bool = False  # encode: multiply the gradient by `factor` wherever it is read
    refusal: str = ""  # what is done about values that are not finite and damaged payloads; "": return why
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    fields: dict[int, str] = field(default_factory=dict)  # decode's scalar fields
    sizes: dict[str, str] = field(default_factory=dict)  # of counted vectors

    def line(self, text: str = "") -> None:
        """Write one line at the present depth."""
        self.lines.append("    " * self.depth + text if text else "")

    def refuse(self, why: str) -> str:
        """Return text that ends the kernel for a reason."""
        return self.refusal or f"return {why}"

    def block(self, head: str, body: list[str]) -> None:
        """Write a compound statement."""
        self.line(head)
        self.depth += 1
        for text in body:
            self.line(text)
        self.depth -= 1

    # Sizes

    def size(self, vector: str) -> str:
        """Return text for the size of a vector (the gradient's is `numel`)."""
        if vector in INPUTS or vector == TOTAL:
            return "numel"
        return self.sizes.get(vector) or self.length(self.schedule.vectors[vector].length)

    def length(self, length: Length) -> str:
        """Return text for a length."""
        whole = "numel" if length.of == GRADIENT else self.size(length.of)
        return whole if length.group == 1 else f"({whole} + {length.group - 1}) // {length.group}"

    # Steps

    def steps(self) -> None:
        """Write the schedule."""
        scalars = self.scalar_body()
        number = 0
        for step in self.schedule.steps:
            match step:
                case Let():
                    text = scalars.value(step.expr)
                    self.flush(scalars)
                    self.line(f"{self.names.of(step.name)} = {bare(text)}")
                case Pass():
                    number += 1
                    self.line(f"# pass {number} over {step.length}")
                    write_passes(self, [step])
                case Tiled():
                    number += 1
                    self.line(f"# pass {number} over {GRADIENT}, stretch by stretch")
                    write_passes(self, step.passes, step.local)
                case Apply():
                    self.apply(step, scalars)

    def scalar_body(self) -> Body:
        """Return a body for scalars between passes."""
        return Body(self.names, lambda name: None, {}, self.fields, self.size, index="int32(0)", in_loop=False)

    def flush(self, body: Body) -> None:
        """Write what a body has collected."""
        for text in body.lines:
            self.line(text)
        body.lines.clear()

    def apply(self, step: Apply, scalars: Body) -> None:
        """Write a whole-vector operator."""
        arguments = [self.names.of(name) for name in step.vectors]
        arguments += [scalars.value(scalar) for scalar in step.scalars]
        self.flush(scalars)
        if self.operators[step.operator].draws:
            arguments += ["seed_low", "seed_high", str(step.stream)]
        name = self.names.of(step.name)
        self.line(f"{name} = {step.operator}({', '.join(arguments)})")
        if step.length.of == step.name:
            self.sizes[step.name] = f"{name}.size"

    # The payload

    def offset(self, number: int) -> str:
        """Return text for the first byte of a field."""
        fixed, moving = 0, []
        for before in self.program.layout.fields[:number]:
            if isinstance(before.type, Scalar):
                fixed += before.type.nbytes
            else:
                assert before.length is not None
                moving.append(nbytes(before.type.element, self.length(before.length)))
        return " + ".join([str(fixed), *moving])

    def encode(self, later: bool = False) -> None:
        """Write the body of encode; `later`, what the last payload carried is taken off the residual first."""
        self.line("numel = gradient.size")
        if later:
            self._find_fields(LAST, f"{LAST}_")
        self.steps()
        body = self.scalar_body()
        for number, source in enumerate(self.program.encode.fields):
            if isinstance(source, Expr):
                kind = self.program.layout.fields[number].type
                assert isinstance(kind, Scalar)
                text = body.value(source)
                self.flush(body)
                if kind.is_float and source.op != "param":
                    self.block(f"if not is_finite({text}):", [self.refuse("NONFINITE")])
                self.line(f"store_{kind.storage}(out, {self.offset(number)}, {text})")
        written = self.offset(len(self.program.layout.fields))
        if self.refusal:
            self.block(f"if {written} != nbytes:", [self.refusal])
        else:
            self.line(f"return {written}")

    def decode(self) -> None:
        """Write the body of decode: find and check the fields, then run the passes."""
        self.line("numel = out.size")
        self._find_fields("payload", "", dict(self.program.decode.checks))
        self.block(f"if payload.size != {self.offset(len(self.program.layout.fields))}:", [self.refuse("DAMAGED")])
        if any(node.op == "random" for item in self.program.decode.statements for node in nodes(item)):
            self.line("seed_low = seed_high = uint32(0)")  # decode draws from the stream of seed 0
        self.steps()
        if not self.refusal:
            self.line("return 0")

    def _find_fields(self, payload: str, prefix: str, checks: Mapping[int, Expr] | None = None) -> None:
        """Write where the fields of a payload are; with `checks`, only what encode can have written is let through."""
        counted = {field.counts: number for number, field in enumerate(self.program.layout.fields) if field.counts}
        vectors = {item.field: item.name for item in self.program.decode.statements if isinstance(item, Read)}
        for number, item in enumerate(self.program.layout.fields):
            offset = self.offset(number)
            if isinstance(item.type, Vector):
                assert item.length is not None
                width = nbytes(item.type.element, self.length(item.length))
                if number in vectors:
                    place = self.names.of_bytes(prefix + vectors[number])
                    self.line(f"{place} = {payload}[{offset} : {offset} + {width}]")
                continue
            if checks is not None:
                self.block(f"if payload.size < {offset} + {item.type.nbytes}:", [self.refuse("DAMAGED")])
            name = self.fields[number] = self.names.unique(prefix + item.name.replace(".", "_"))
            self.line(f"{name} = load_{item.type.storage}({payload}, {offset})")
            if checks is not None:
                self._refuse(number, item.type, name, checks)
            if item.counts in counted:
                self.sizes[item.counts] = f"int64({name})"

    def _refuse(self, number: int, kind: Scalar, name: str, checks: Mapping[int, Expr]) -> None:
        """Write the tests a scalar field must pass."""
        if self.program.layout.fields[number].counts:
            self.block(f"if {name} < 0 or {name} > numel:", [self.refuse("DAMAGED")])
        elif number in checks:
            body = self.scalar_body()
            text = body.value(checks[number])
            self.flush(body)
            self.block(f"if {name} != {text}:", [self.refuse("DAMAGED")])
        elif kind.is_float:
            self.block(f"if not is_finite({name}):", [self.refuse("DAMAGED")])
        elif kind.bits < 8:
            self.block(f"if {name} > {kind.high}:", [self.refuse("DAMAGED")])


def nodes(statement: Statement) -> list[Expr]:
    """Return every expression in a statement."""
    return [node for expr in expressions(statement) for node in walk(expr)]


def nbytes(element: Scalar, size: str) -> str:
    """Return text for the bytes of a packed vector."""
    if element.bits < 8:
        return f"({size} + {element.per_byte - 1}) // {element.per_byte}"
    return f"({size})" if element.bits == 8 else f"{element.nbytes} * ({size})"
