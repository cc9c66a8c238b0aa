"""Reductions by a function of the program's own (`fold`), on the GPU.

There is no value that such a function leaves alone, so every lane carries whether it has met an element yet, and two
lanes are combined by the function only where both have.
"""

from penstock.compll.backends.triton.expr import Kernel
from penstock.compll.backends.triton.procedure import Procedure
from penstock.compll.backends.triton.text import register
from penstock.compll.ir import Expr, Reduce, walk
from penstock.errors import CodecError

COMBINE = """@triton.jit
def {name}(left, left_on, right, right_on):
    \"\"\"{summary}\"\"\"
{lines}    return tl.where(left_on != 0, tl.where(right_on != 0, {both}, left), right), left_on | right_on
"""


def fold_step(k: Kernel, p: Procedure, item: Reduce, value: str, size: str) -> None:
    """Write what takes the elements of a tile into the lanes."""
    part, function = f"{item.name}_part", f"{k.name}_{item.name}"
    k.helpers.insert(0, _combine(k, p, item, function))
    k.use("partials_ptr")
    k.head.append(f"{part} = tl.full([BLOCK // ROW, ROW], 0, {register(item.expr.type)})")
    k.head.append(f"{part}_on = tl.full([BLOCK // ROW, ROW], 0, tl.int32)")
    k.loop.append(f"{part}, {part}_on = {function}({part}, {part}_on, {value}, (i < {size}).to(tl.int32))")


def fold_part(k: Kernel, item: Reduce, slot: int) -> list[str]:
    """Return the lines in which a program leaves its part: the value in one slot, whether there is one in the next."""
    part, function = f"{item.name}_part", f"{k.name}_{item.name}"
    rows = f"{item.name}_rows"  # one axis after the other: of a reshaped tile Triton 3.6 reduces only a part
    stores = [
        f"tl.store(partials_ptr + {slot + number} * PROGRAMS + tl.program_id(0), {name})"
        for number, name in enumerate((f"{item.name}_one", f"{item.name}_on"))
    ]
    return [
        f"{rows}, {rows}_on = tl.reduce(({part}, {part}_on), 1, {function})",
        f"{item.name}_one, {item.name}_on = tl.reduce(({rows}, {rows}_on), 0, {function})",
        *stores,
    ]


def fold_end(k: Kernel, item: Reduce, slot: int, name: str) -> list[str]:
    """Return the lines in which the last program combines the parts; 0 where there was no element."""
    kind, function = register(item.expr.type), f"{k.name}_{item.name}"
    parts = ", ".join(
        f"partial(partials_ptr, {slot + number}, 0.0, PROGRAMS).to({what})"
        for number, what in ((0, kind), (1, "tl.int32"))
    )
    return [
        f"{name}, {name}_on = tl.reduce(({parts}), 0, {function})",
        f"{name} = tl.where({name}_on != 0, {name}, 0)",
    ]


def _combine(k: Kernel, p: Procedure, item: Reduce, function: str) -> str:
    assert item.combine is not None
    for node in walk(item.combine):
        if node.op not in ("const", "operand", "call", "cast", "select") and not node.args:
            raise CodecError(f"{p.program.name}: {item.name} reduces by a function of {_what(node)}; not on a GPU")
    writer = Kernel("", "", functions=k.functions)
    both = writer.text(p, item.combine, "tile")
    k.calls |= writer.calls
    lines = "".join(f"    {line}\n" for line in writer.loop)
    return COMBINE.format(name=function, summary=f"{item.name} of two lanes.", lines=lines, both=both)


def _what(node: Expr) -> str:
    return f"the parameter {node.value}" if node.op == "param" else f"{node.op} {node.value}"
