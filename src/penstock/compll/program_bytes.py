"""A compiled program as bytes of a file and back: JSON under a digest, so that reading one runs nothing.

    penstock-program/1 SHA-256 OF THE REST
    {"nodes": [...], "program": {...}}

Expressions are numbered, arguments first, since two that are the same object stay so (`ir.Expr`). Scalars are called by
their names; everything else is one of the classes in `_CLASSES`.
"""

import hashlib
import json
from dataclasses import fields
from typing import Any

from penstock.compll import ir
from penstock.compll.types import BOOL, SCALARS, ByBlock, Scalar, Vector

_FORMAT = b"penstock-program/1"
_SCALARS = {**SCALARS, BOOL.name: BOOL}
_CLASSES: dict[str, Any] = {
    each.__name__: each
    for each in (
        *(ir.Let, ir.Map, ir.Reduce, ir.GroupReduce, ir.Filter, ir.Apply, ir.Read),
        *(ir.Length, ir.Field, ir.Layout, ir.Encode, ir.Decode, ir.Parameter, ir.Program, Vector, ByBlock),
    )
}


def program_bytes(program: ir.Program) -> bytes:
    """Return the contents of a program's file."""
    writer = _Writer()
    document = writer.value(program)
    text = json.dumps({"nodes": writer.nodes, "program": document}).encode()
    return b"%s %s\n%s" % (_FORMAT, hashlib.sha256(text).hexdigest().encode(), text)


def program_from_bytes(data: bytes) -> ir.Program:
    """Return the program of a file; raise `ValueError` where it is another's, cut short or damaged."""
    head, _, text = data.partition(b"\n")
    if head != b"%s %s" % (_FORMAT, hashlib.sha256(text).hexdigest().encode()):
        raise ValueError("not a whole file of a compiled program")
    try:
        program = _parse(json.loads(text))
    except (TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError("a program with a digest of its own, and not as this version writes it") from error
    if not isinstance(program, ir.Program):
        raise ValueError(f"a {type(program).__name__} in the place of a program")
    return program


def _parse(document: Any) -> Any:
    nodes: list[ir.Expr] = []
    for node in document["nodes"]:
        nodes.append(ir.Expr(**{name: _read(value, nodes) for name, value in node.items()}))
    return _read(document["program"], nodes)


class _Writer:
    """Collects the expressions of a program."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = []
        self._numbers: dict[int, int] = {}  # of expressions, by id

    def value(self, value: Any) -> Any:
        """Return a value as JSON has it."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, tuple):
            return [self.value(each) for each in value]
        if isinstance(value, Scalar):
            return {"scalar": value.name}
        if isinstance(value, ir.Expr):
            return {"node": self._number(value)}
        assert type(value).__name__ in _CLASSES, f"a program holds a {type(value).__name__}"
        return {"is": type(value).__name__} | {
            each.name: self.value(getattr(value, each.name)) for each in fields(value)
        }

    def _number(self, root: ir.Expr) -> int:
        for node in ir.walk(root):
            if id(node) not in self._numbers:
                self.nodes.append({each.name: self.value(getattr(node, each.name)) for each in fields(node)})
                self._numbers[id(node)] = len(self.nodes) - 1
        return self._numbers[id(root)]


def _read(value: Any, nodes: list[ir.Expr]) -> Any:
    if isinstance(value, list):
        return tuple(_read(each, nodes) for each in value)
    if not isinstance(value, dict):
        return value
    if "scalar" in value:
        return _SCALARS[value["scalar"]]
    if "node" in value:
        return nodes[value["node"]]
    return _CLASSES[value["is"]](**{name: _read(each, nodes) for name, each in value.items() if name != "is"})
