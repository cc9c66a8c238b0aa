"""Error feedback inside encode: decode's statements, made to read what encode has just computed."""

from collections.abc import Mapping
from dataclasses import replace

from penstock.compll.ir import (
    NUMEL,
    RESIDUAL,
    Apply,
    Expr,
    Filter,
    GroupReduce,
    Let,
    Map,
    Program,
    Read,
    Reduce,
    Statement,
    walk,
)
from penstock.compll.lower.passes import LAST, TOTAL
from penstock.compll.types import FLOAT


def element(name: str) -> Expr:
    """Return element i of an input."""
    return Expr("element", FLOAT, value=name)


def rename(expr: Expr, names: Mapping[str, str], memo: dict[int, Expr]) -> Expr:
    """Return an expression that reads other vectors; shared parts stay shared. Sizes are left alone."""
    if id(expr) not in memo:
        args = tuple(rename(argument, names, memo) for argument in expr.args)
        value = names.get(expr.value, expr.value) if expr.op in ("element", "at", "name") else expr.value
        same = value == expr.value and all(a is b for a, b in zip(args, expr.args, strict=True))
        memo[id(expr)] = expr if same else replace(expr, args=args, value=value)
    return memo[id(expr)]


def renamed(statement: Statement, names: Mapping[str, str], memo: dict[int, Expr]) -> Statement:
    """Return a statement that reads other vectors."""
    match statement:
        case Let() | Map() | GroupReduce() | Reduce():
            return replace(statement, expr=rename(statement.expr, names, memo))
        case Filter():
            keep, value = (rename(expr, names, memo) for expr in (statement.keep, statement.value))
            return replace(statement, keep=keep, value=value)
        case Apply():
            vectors = tuple(names.get(name, name) for name in statement.vectors)
            scalars = tuple(rename(scalar, names, memo) for scalar in statement.scalars)
            return replace(statement, vectors=vectors, scalars=scalars)
        case Read():
            return statement


def inlined_decode(program: Program, fields: tuple[Expr | str, ...]) -> list[Statement] | None:
    """Return decode's statements reading encode's own vectors and scalars, and the residual they leave; None where it
    is not element-wise."""
    decode = program.decode
    if not all(isinstance(item, Let | Map | Read) for item in decode.statements):
        return None
    names = {item.name: f"{item.name}_back" for item in decode.statements}
    for item in decode.statements:
        if isinstance(item, Read):
            source = fields[item.field]
            assert isinstance(source, str)
            names[item.name] = source
    memo: dict[int, Expr] = {}
    made: list[Statement] = []
    for item in decode.statements:
        if isinstance(item, Let | Map):
            _put_fields(item.expr, fields, memo)
            made.append(replace(renamed(item, names, memo), name=names[item.name]))
    if names[decode.result] not in {item.name for item in made}:
        return None
    left = Expr("sub", FLOAT, (element(TOTAL), element(names[decode.result])), name=RESIDUAL)
    return [*made, Map("left", NUMEL, left)]


def last_decode(program: Program) -> list[Statement] | None:
    """Return decode's statements under names of their own, reading the payload before: what the residual still holds.

    None where decode is not element-wise; taking off a sparse payload at once costs next to nothing.
    """
    decode = program.decode
    is_elementwise = all(isinstance(item, Let | Map | Read) for item in decode.statements)
    if not is_elementwise or any(field.counts for field in program.layout.fields):
        return None
    names = {item.name: f"{LAST}_{item.name}" for item in decode.statements}
    memo: dict[int, Expr] = {}
    return [replace(renamed(item, names, memo), name=names[item.name]) for item in decode.statements]


def _put_fields(expr: Expr, fields: tuple[Expr | str, ...], memo: dict[int, Expr]) -> None:
    """Make every `field` of an expression stand for the scalar that encode wrote there."""
    for node in walk(expr):
        if node.op == "field":
            source = fields[node.value]
            assert isinstance(source, Expr)
            memo[id(node)] = source
