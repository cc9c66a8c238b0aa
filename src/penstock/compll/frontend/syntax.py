"""The syntax tree of a compressor; every node knows where it stands in the source."""

from dataclasses import dataclass, field

from penstock.errors import CompileError


@dataclass(frozen=True, slots=True)
class Position:
    """Where something stands: line and column count from 1."""

    line: int
    column: int
    end_column: int  # one past the last character; the line's end where the text spans lines


@dataclass(frozen=True, slots=True)
class Source:
    """A program's text and the name errors call it by."""

    path: str
    text: str

    def error(self, at: Position, problem: str, advice: str) -> CompileError:
        """Return the error that points at `at`: what was found and what was wanted, then what to do."""
        lines = self.text.splitlines() or [""]
        line = lines[min(at.line, len(lines)) - 1]
        return CompileError(self.path, at.line, at.column, line, max(1, at.end_column - at.column), problem, advice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Anything in the tree."""

    at: Position


@dataclass(frozen=True, slots=True)
class Number(Node):
    """A literal; an int or a float."""

    value: int | float


@dataclass(frozen=True, slots=True)
class Name(Node):
    """A variable, or a function handed to an operator."""

    name: str


@dataclass(frozen=True, slots=True)
class Member(Node):
    """`value.member`: a vector's size, a parameter."""

    value: "Expression"
    member: str


@dataclass(frozen=True, slots=True)
class At(Node):
    """`vector[index]`."""

    vector: "Expression"
    index: "Expression"


@dataclass(frozen=True, slots=True)
class Call(Node):
    """`function<template>(arguments)`."""

    function: str
    template: str  # name of a scalar type, or empty
    arguments: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class Prefix(Node):
    """`-x` or `!x`."""

    operator: str
    operand: "Expression"


@dataclass(frozen=True, slots=True)
class Infix(Node):
    """`left operator right`."""

    operator: str
    left: "Expression"
    right: "Expression"


@dataclass(frozen=True, slots=True)
class Choose(Node):
    """`condition ? yes : no`."""

    condition: "Expression"
    yes: "Expression"
    no: "Expression"


@dataclass(frozen=True, slots=True)
class TypeName(Node):
    """A type as written: a scalar's name or the width in `uint<width>`, and whether a star or `[block]` follows."""

    name: str
    width: "Expression | None"
    is_vector: bool
    block: "Expression | None" = None


@dataclass(frozen=True, slots=True)
class Cast(Node):
    """`(type) operand`."""

    type: TypeName
    operand: "Expression"


Expression = Number | Name | Member | At | Call | Prefix | Infix | Choose | Cast


@dataclass(frozen=True, slots=True)
class Declare(Node):
    """`type name = value;` (value optional)."""

    type: TypeName
    name: str
    value: Expression | None


@dataclass(frozen=True, slots=True)
class Assign(Node):
    """`name = value;`."""

    name: str
    value: Expression


@dataclass(frozen=True, slots=True)
class Branch(Node):
    """`if (condition) ... else ...`."""

    condition: Expression
    yes: tuple["Statement", ...]
    no: tuple["Statement", ...]


@dataclass(frozen=True, slots=True)
class Return(Node):
    """`return value;`."""

    value: Expression


Statement = Declare | Assign | Branch | Return


@dataclass(frozen=True, slots=True)
class Field(Node):
    """One parameter of a `param` block, with its default and what it may be."""

    type: TypeName
    name: str
    default: int | float | None
    choices: tuple[int | float, ...]  # empty: any
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class ParamBlock(Node):
    """`param Name { ... }`."""

    name: str
    fields: tuple[Field, ...]


@dataclass(frozen=True, slots=True)
class Argument(Node):
    """One argument of a function; its type is the name of a param block where it is a string."""

    type: TypeName | str
    name: str


@dataclass(frozen=True, slots=True)
class Function(Node):
    """A function; `result` is None for `void`."""

    result: TypeName | None
    name: str
    arguments: tuple[Argument, ...]
    body: tuple[Statement, ...]
    end: Position  # its closing brace


@dataclass(frozen=True, slots=True)
class Tree:
    """A whole program, in the order written."""

    source: Source
    params: tuple[ParamBlock, ...] = ()
    globals: tuple[Declare, ...] = ()
    functions: tuple[Function, ...] = field(default=())
