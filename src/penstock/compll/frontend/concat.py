"""Writing the compressed bytes: `concat` defines the layout that `extract` is held against."""

from typing import TYPE_CHECKING

from penstock.compll.frontend import arithmetic, syntax
from penstock.compll.frontend.scope import Compressed, Scope, Value, VectorRef
from penstock.compll.ir import GRADIENT, LATEST, Expr, Field, Length
from penstock.compll.types import BOOL, INT32, MAX_NUMEL, SCALARS, Vector

if TYPE_CHECKING:
    from penstock.compll.frontend.evaluate import Evaluator


def concat(ev: "Evaluator", node: syntax.Call, scope: Scope, hint: str) -> Value:
    """`concat(a, ...)`: the compressed bytes: scalars and vectors one after another."""
    if ev.layout is not None:
        raise ev.error(node, "concat writes compressed bytes, which only encode does", "move it to encode")
    if ev.packed is not None:
        raise ev.error(node, "encode calls concat twice", "write all fields in one concat")
    fields: list[Field] = []
    sources: list[Expr | str] = []
    for argument in node.arguments:
        value = ev.value(argument, scope)
        name = _field_name(argument, value)
        if isinstance(value, VectorRef) and value.name in (GRADIENT, LATEST):  # sent as it is: a vector of its own
            value = ev.writer.map("values", value.length, value.at_i())
        if isinstance(value, VectorRef):
            _count_first(fields, sources, value.length)
            fields.append(Field(name, Vector(value.element), value.length))
            sources.append(value.name)
        elif isinstance(value, Expr):
            ev.refuse_by_block(argument, value)
            value = arithmetic.convert(value, SCALARS["uint1"]) if value.type is BOOL else value
            fields.append(Field(name, value.type))
            sources.append(value)
        else:
            raise ev.error(argument, "concat takes scalars and vectors", "hand over their members")
    ev.packed = tuple(fields), tuple(sources)
    return Compressed()


def _count_first(fields: list[Field], sources: list[Expr | str], length: Length) -> None:
    if length.of == GRADIENT or any(field.counts == length.of for field in fields):
        return
    fields.append(Field(f"{length.of}.size", INT32, counts=length.of))
    sources.append(Expr("size", INT32, value=length.of, low=0, high=MAX_NUMEL))


def _field_name(node: syntax.Expression, value: Value) -> str:
    match node:
        case syntax.Name():
            return node.name
        case syntax.Member():
            return node.member
        case syntax.At():
            return "values"
    if isinstance(value, VectorRef):
        return value.name
    return str(value.value) if isinstance(value, Expr) and value.op == "name" else "value"
