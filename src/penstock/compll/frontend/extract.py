"""Reading what encode wrote: `extract` is held against the layout that `concat` defined."""

from typing import TYPE_CHECKING

from penstock.compll.frontend import syntax
from penstock.compll.frontend.scope import Compressed, Scope, Value, VectorRef
from penstock.compll.ir import GRADIENT, Expr, Field, Length, Read
from penstock.compll.types import SCALARS, ByBlock, Scalar, Type, Vector

if TYPE_CHECKING:
    from penstock.compll.frontend.evaluate import Evaluator


def extract(e: "Evaluator", node: syntax.Call, scope: Scope, want: Type | None, hint: str) -> Value:
    """Return the next field of the compressed bytes; its type must be what concat put there."""
    if node.template:
        want = SCALARS[node.template]
    if e.layout is None:
        raise e.error(node, "extract reads compressed bytes, which only decode has", "move it to decode")
    if len(node.arguments) != 1 or not isinstance(e.value(node.arguments[0], scope), Compressed):
        raise e.error(node, "extract takes the compressed bytes", "write extract(compressed)")
    if want is None:
        raise e.error(node, "extract needs to know the type", "assign it to a variable, or extract<uint8>(...)")
    fields = e.layout.fields
    while e.read < len(fields) and fields[e.read].counts:
        e.read += 1
    if e.read == len(fields):
        raise e.error(node, "everything that concat wrote is read already", "remove this extract, or concat more")
    number, e.read = e.read, e.read + 1
    return _field(e, node, number, fields[number], want, hint)


def _field(e: "Evaluator", node: syntax.Call, number: int, written: Field, want: Type, hint: str) -> Value:
    held = Vector(want.element) if isinstance(want, ByBlock) else want
    fits = not isinstance(want, ByBlock) or written.length == Length(GRADIENT, want.block)
    if written.type != held or not fits:
        problem = f"extract reads {want.name} where concat wrote {written.name!r}, a {written.type.name}"
        raise e.error(node, problem, "read what concat wrote, in its order")
    if not isinstance(want, Scalar):
        assert written.length is not None
        name = e.writer.fresh(hint or written.name)
        e.writer.statements.append(Read(name, number, want.element, written.length))
        low, high = want.element.low, want.element.high
        return VectorRef(name, want.element, written.length, low, high, isinstance(want, ByBlock))
    if number in e.expected:
        return e.expected[number]
    return Expr("field", want, value=number, low=want.low, high=want.high)
