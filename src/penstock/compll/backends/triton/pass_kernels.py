"""Triton kernels of passes: maps in registers, reductions carried from tile to tile, vectors and fields stored.

A `fold` reduction has no neutral element, so every lane carries whether it has met an element yet, and two lanes are
combined only where both have. With error feedback the gradient is loaded as v = gradient + (residual - decode(last
payload)), which is left in the residual's memory; the payload of v is subtracted by the next step (`codecs/feedback.py`
says why), or by the kernel itself where it computes all that is sent. A filter is two kernels: one bit for each element
that is kept and their number, then the elements in order.
"""

from collections.abc import Mapping, Sequence

from penstock.compll.backends.triton.kernel_text import limit, register
from penstock.compll.backends.triton.triton_expr import Kernel, Procedure
from penstock.compll.functions import Function
from penstock.compll.ir import GRADIENT, Expr, Filter, GroupReduce, Reduce, Statement, walk
from penstock.compll.lower.passes import TOTAL, Keep, Pack, Pass, show
from penstock.compll.types import Scalar
from penstock.errors import CodecError

WORST = "worst = tl.maximum(worst, tl.abs({}), propagate_nan=tl.PropagateNan.ALL)"
WORST_START = "worst = tl.zeros([BLOCK // ROW, ROW], tl.float32)"
REPORT = ["if tl.max(as_bits(worst)) >= NOT_FINITE:", "    tl.atomic_or(status_ptr, WRONG_GRADIENT)"]


class PassWriter:
    """Writes the kernel of a pass that reduces, keeps and packs; filters and groups have kernels of their own."""

    def __init__(
        self,
        p: Procedure,
        name: str,
        step: Pass,
        functions: Mapping[str, Function],
        local: frozenset[str] = frozenset(),
        block: int = 0,
    ) -> None:
        self.p, self.step = p, step
        self.kernel = Kernel(name, f"Over {step.length}: {describe(p, step) or 'fields'}.", functions=functions)
        self.kernel.over, self.kernel.local, self.kernel.block = step.length, local, block
        self.reduces = [output for output in step.outputs if isinstance(output, Reduce)]

    def write_header(self) -> None:
        """Write the copy of the payload's header."""
        k = self.kernel
        k.use_constants("HEADER")
        k.use("payload_ptr")
        k.use("header_ptr")
        k.head += ["if HEADER > 0:", "    if tl.program_id(0) == 0:"]
        k.head.append("        copy_bytes(payload_ptr - HEADER, header_ptr, HEADER)")

    def write(
        self, feedback: Procedure | None, offers: bool, unwritten: dict[int, Expr], done: set[str],
        left: Sequence[Statement] = (),
    ) -> Kernel:  # fmt: skip
        """Write the whole kernel; return it.

        `offers` says that this pass loads the gradient with feedback, `unwritten` are the scalar fields still to be
        written (those that can be are taken out), `done` the names that earlier steps have left. `left` computes what
        is not sent, where all that is sent is computed here.
        """
        k, p = self.kernel, self.p
        size = k.size(p, self.step.length)
        roots = [item.expr for item in self.reduces]
        roots += [
            p.maps[item.vector].expr for item in self.step.outputs if isinstance(item, Keep) and item.vector in p.maps
        ]
        k.count_uses([*roots, *(item.expr for item in p.maps.values()), *(item.expr for item in p.lets.values())])
        checked = ["gradient"] if offers else []
        if offers:
            load_with_feedback(k, feedback, bool(left))
        self._fill_loop(size, checked)
        if left:
            settle(k, p, left)
        if k.loop:
            carried = [name for item in self.reduces for name in _carried(item)]
            k.loop_over(size, [*carried, *(["worst"] if checked else [])], k.summary)
        self._fill_end(size, unwritten, done, REPORT if checked else [])
        return k

    def _fill_loop(self, size: str, checked: list[str]) -> None:
        k, p = self.kernel, self.p
        is_checked = bool(checked)
        for item in self.reduces:
            self._accumulate(item, k.text(p, item.expr, "tile"), size)
        for output in self.step.outputs:
            if isinstance(output, Keep):
                value = k.element(p, output.vector, "tile")
                k.loop.append(f"store({k.use(f'{output.vector}_ptr')}, i, {value}, {size}, full)")
        for output in self.step.outputs:
            if isinstance(output, Pack) and p.length(output.vector) != self.step.length:
                checked += self._store_by_block(output)
            elif isinstance(output, Pack):
                value = k.element(p, output.vector, "tile")
                k.loop.append(self._store_field(output, value, size))
                if output.element.is_float and not is_checked:
                    checked.append(f"held({value}, i, {size}, full, 0.0)")
        k.loop += [WORST.format(value) for value in checked]
        if checked:
            k.head.append(WORST_START)
            k.use("status_ptr")

    def _store_by_block(self, output: Pack) -> list[str]:
        """Write the elements of a field that has one for each block; return what must be finite."""
        k = self.kernel
        value, size = k.element(self.p, output.vector, "block"), k.size(self.p, self.p.length(output.vector))
        k.loop.append(self._store_field(output, value, size, k.block_places()))
        inside = f"held({value}, {k.block_places()}, {size}, full, 0.0)"
        return [f"spread({inside}, {k.block}, BLOCK)"] if output.element.is_float else []

    def _store_field(self, output: Pack, value: str, size: str, at: str = "i") -> str:
        """Return the line that writes element i of a vector field."""
        k, bits = self.kernel, output.element.bits
        offset = k.offset(self.p, output.field)
        pointer = f"{k.use(self.p.payload)} + {offset}"
        if bits < 8:
            return f"store_packed({pointer}, {value}, block, {size}, full, {bits}, BLOCK)"
        if bits == 8:
            return f"store({pointer}, {at}, {value}, {size}, full)"
        value = f"as_bits({value})" if output.element.is_float else value
        return f"store_words({pointer}, {at}, {value}, {size}, full, {bits // 8}, {k.aligned(offset, bits)})"

    def _accumulate(self, item: Reduce, value: str, size: str) -> None:
        k, name, is_float = self.kernel, f"{item.name}_part", item.expr.type.is_float
        if item.reducer == "fold":
            fold_step(k, self.p, item, value, size)
            return
        k.use("partials_ptr")
        if item.reducer == "sum":
            start, function = "0.0" if is_float else "0", "{} + {}"
        else:
            start = limit(item.reducer, is_float)
            function = "tl.minimum({}, {})" if item.reducer == "smaller" else "tl.maximum({}, {})"
        k.head.append(f"{name} = tl.full([BLOCK // ROW, ROW], {start}, {register(item.expr.type)})")
        k.loop.append(f"{name} = {function.format(name, f'held({value}, i, {size}, full, {start})')}")

    def _fill_end(self, size: str, unwritten: dict[int, Expr], done: set[str], report: list[str]) -> None:
        k, p = self.kernel, self.p
        before = list(report)
        slot = 0
        for item in self.reduces:
            k.use_constants("PROGRAMS")
            name = k.fresh(item.name)
            before += fold_part(k, item, slot) if item.reducer == "fold" else [_part(item, slot)]
            k.end += (
                fold_end(k, item, slot, name) if item.reducer == "fold" else [f"{name} = {_whole(item, slot, size)}"]
            )
            bits = f"as_bits({name})" if item.expr.type.is_float else name
            k.end.append(f"tl.store({k.use('scalars_ptr')} + {p.slots[item.name]}, {bits})")
            k.finals[item.name] = name
            slot += slots_of(item)
        reduced = {item.name for item in self.reduces}
        for number in [n for n, source in unwritten.items() if p.needs(source) <= done | reduced]:
            self._write_scalar(number, unwritten.pop(number))
        if k.end:
            condition = f"is_last({k.use('ticket_ptr')})" if reduced else "tl.program_id(0) == 0"
            k.end = [f"if {condition}:", *(f"    {line}" for line in k.end)]
        k.end = [*before, *k.end]

    def _write_scalar(self, number: int, source: Expr) -> None:
        k, kind = self.kernel, self.p.program.layout.fields[number].type
        assert isinstance(kind, Scalar)
        value = k.text(self.p, source, "end")
        if kind.is_float and source.op != "param":  # an overflow: receivers would take it for damage
            k.end += [f"if is_finite({value}) == 0:", f"    tl.atomic_or({k.use('status_ptr')}, WRONG_GRADIENT)"]
        value = f"as_bits({value})" if kind.is_float else value
        k.end.append(f"store_scalar({k.use(self.p.payload)} + {k.offset(self.p, number)}, {value}, {kind.nbytes})")


def slots_of(item: Reduce) -> int:
    """Return how many numbers each program leaves for a reduction."""
    return 2 if item.reducer == "fold" else 1


def _carried(item: Reduce) -> list[str]:
    part = f"{item.name}_part"
    return [part, f"{part}_on"] if item.reducer == "fold" else [part]


def _part(item: Reduce, slot: int) -> str:
    """Return the line in which a program leaves its part of a reduction."""
    function = {"sum": "sum", "smaller": "min", "greater": "max"}[item.reducer]
    wide = ".to(tl.float64)" if item.expr.type.is_float and item.reducer == "sum" else ""
    place = f"partials_ptr + {slot} * PROGRAMS + tl.program_id(0)"
    return f"tl.store({place}, tl.{function}({item.name}_part{wide}))"


def _whole(item: Reduce, slot: int, size: str) -> str:
    """Return the text that computes a reduction from the programs' parts."""
    is_float = item.expr.type.is_float
    if item.reducer == "sum":
        if is_float:
            return f"tl.sum(partial(partials_ptr, {slot}, 0.0, PROGRAMS)).to(tl.float32)"
        return f"tl.sum(partial(partials_ptr, {slot}, 0.0, PROGRAMS).to(tl.int64)).to(tl.int32)"
    start = limit(item.reducer, is_float) if is_float else f"{limit(item.reducer, is_float)}.0"
    function = "min" if item.reducer == "smaller" else "max"
    found = f"tl.{function}(partial(partials_ptr, {slot}, {start}, PROGRAMS)).to({register(item.expr.type)})"
    return f"tl.where({size} > 0, {found} + {'0.0' if is_float else '0'}, {'0.0' if is_float else '0'})"


def describe(p: Procedure, step: Pass) -> str:
    """Return a sentence on what a pass does."""
    parts = [f"{item.name} = {item.reducer} of {show(item.expr)}" for item in step.outputs if isinstance(item, Reduce)]
    parts += [f"{item.vector} kept" for item in step.outputs if isinstance(item, Keep)]
    names = [p.program.layout.fields[item.field].name for item in step.outputs if isinstance(item, Pack)]
    return "; ".join([*parts, *(f"field {name}" for name in names)])[:90]


COMBINE = """@triton.jit
def {name}(left, left_on, right, right_on):
    \"\"\"{summary}\"\"\"
{lines}    return tl.where(left_on != 0, tl.where(right_on != 0, {both}, left), right), left_on | right_on
"""


def fold_step(k: Kernel, p: Procedure, item: Reduce, value: str, size: str) -> None:
    """Write the lines that fold a tile's elements into the lanes."""
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


def load_with_feedback(k: Kernel, last: Procedure | None, settles: bool) -> None:
    """Write the load of the gradient; `last` is the decode of the payload before, where it can be inlined."""
    gradient, residual = k.use("gradient_ptr"), k.use("residual_ptr")
    k.use_constants("FEEDBACK")
    k.loop.append(f"latest = load({gradient}, i, numel, full).to(tl.float32)")
    k.loop += ["gradient = latest", "if FEEDBACK:", f"    kept = load({residual}, i, numel, full)"]
    if last is not None:
        _take_off(k, last)
    stored = f"store({residual}, i, gradient, numel, full)"
    k.loop += [
        "    gradient = latest + kept",
        *(["    if not SETTLE:", f"        {stored}"] if settles else [f"    {stored}"]),
    ]
    k.used |= {"gradient", "latest", "kept"}
    k.known["tile", GRADIENT] = "gradient"


def settle(k: Kernel, p: Procedure, statements: Sequence[Statement]) -> None:
    """Write the lines that leave in the residual what is not sent; `statements` decode the payload, `left` last."""
    k.use_constants("SETTLE")
    p.add(statements)
    k.known["tile", TOTAL] = "gradient"
    outer, k.loop = k.loop, []
    left = k.element(p, statements[-1].name, "tile")
    lines, k.loop = k.loop, outer
    lines.append(f"store({k.use('residual_ptr')}, i, {left}, numel, full)")
    k.loop += ["if FEEDBACK:", "    if SETTLE:", *(f"        {line}" for line in lines)]


def _take_off(k: Kernel, last: Procedure) -> None:
    """Write the subtraction of the last payload from the residual, inside `if FEEDBACK: if LAST:`."""
    k.use_constants("LAST")
    outer_head, outer_loop = k.head, k.loop
    k.head, k.loop = [], []
    sent = k.element(last, last.program.decode.result, "tile")
    head, loop = k.head, k.loop
    k.head, k.loop = outer_head, outer_loop
    # Scalars of the last payload exist where there is one; elsewhere nothing reads them.
    if head:
        names = [line.partition(" = ")[0] for line in head]
        k.head += ["if LAST:", *(f"    {line}" for line in head)]
        k.head += ["else:", *(f"    {name} = 0" for name in names)]
    k.loop += ["    if LAST:", *(f"        {line}" for line in loop), f"        kept = kept - {sent}"]


Functions = Mapping[str, Function]


def write_mask(p: Procedure, name: str, step: Filter, functions: Functions) -> Kernel:
    """Return the kernel that marks what a filter keeps, and counts it."""
    summary = f"Where {step.name} keeps elements, one bit each, and how many."
    k = Kernel(f"{name}_mask", summary, functions=functions, over=step.over)
    size = k.size(p, step.over)
    keep = k.text(p, step.keep, "tile")
    k.loop += [
        f"keep = ({keep} & (i < {size})).to(tl.int32)",
        "store_packed(mask_ptr, keep, block, (block + 1) * BLOCK, True, 1, BLOCK)",
        "count = count + tl.sum(keep, axis=1)",
    ]
    k.head.append("count = tl.zeros([BLOCK // ROW], tl.int32)")
    for argument in ("mask_ptr", "counts_ptr", "units"):
        k.use(argument)
    k.use_constants("UNIT")
    carried = ["count"]
    if p.is_encode and k.knows("tile", GRADIENT):
        k.use("status_ptr")
        k.head.append(WORST_START)
        k.loop.append(WORST.format(GRADIENT))
        k.end += REPORT
        carried.append("worst")
    k.loop_over_units(size, carried, k.summary)
    k.end.append("tl.store(counts_ptr + tl.program_id(0), tl.sum(count))")
    return k


def write_compact(p: Procedure, name: str, step: Filter, functions: Functions) -> Kernel:
    """Return the kernel that writes what a filter keeps."""
    k = Kernel(f"{name}_compact", f"The elements that {step.name} keeps, in order.", functions=functions)
    for argument in ("mask_ptr", "counts_ptr", "scalars_ptr", f"{step.name}_ptr", "units"):
        k.use(argument)
    value = k.text(p, step.value, "gather")
    k.use_constants("PROGRAMS", "UNIT")
    k.head += [
        "program = tl.arange(0, PROGRAMS)",
        "counts = tl.load(counts_ptr + program, mask=program < tl.num_programs(0), other=0)",
        "start = tl.sum(tl.where(program < tl.program_id(0), counts, 0), axis=0)",
        "if tl.program_id(0) == 0:",
        f"    tl.store(scalars_ptr + {p.slots[f'{step.name}.size']}, tl.sum(counts, axis=0))",
    ]
    k.loop = [
        "for unit in tl.range(tl.program_id(0) * units, (tl.program_id(0) + 1) * units):",
        "    first = unit * (UNIT // 32) + tl.arange(0, UNIT // 32)",
        "    word = tl.load(mask_ptr.to(tl.pointer_type(tl.uint32)) + first)",
        "    count = bit_count(word)",
        "    place = start + tl.cumsum(count, axis=0) - count",
        "    start += tl.sum(count, axis=0)",
        "    left = tl.max(count, axis=0)",
        "    while left > 0:  # takes the lowest bit of every word at a time",
        "        on = word != 0",
        "        i = first * 32 + lowest_bit(word)",
        *(f"        {line}" for line in k.loop),
        f"        tl.store({step.name}_ptr + place, {value}, mask=on)",
        "        place += on.to(tl.int32)",
        "        word = word & (word - 1)",
        "        left -= 1",
    ]
    return k


def write_group(p: Procedure, name: str, step: GroupReduce, functions: Functions) -> Kernel:
    """Return the kernel that reduces groups of neighbours, a row of lanes for each."""
    k = Kernel(name, f"{step.name}: {step.reducer} of every {step.group} neighbours.", functions=functions)
    size, groups = k.size(p, step.over), k.size(p, step.length)
    value, is_float = k.text(p, step.expr, "gather"), step.expr.type.is_float
    k.use_constants("ROWS", "LANES")
    if step.reducer == "sum":
        wide = ".to(tl.float64)" if is_float else ""
        reduced = f"tl.sum(tl.where(on, {value}, 0){wide}, axis=1).to({register(step.expr.type)})"
    else:
        function = "tl.min" if step.reducer == "smaller" else "tl.max"
        start = limit(step.reducer, is_float)
        reduced = f"{function}(tl.where(on, {value}, {start}), axis=1)" + (" + 0.0" if is_float else "")
    k.loop = [
        "group = tl.program_id(0) * ROWS + tl.arange(0, ROWS)",
        "lane = tl.arange(0, LANES)",
        f"i = group[:, None] * {step.group} + lane[None, :]",
        f"on = (lane[None, :] < {step.group}) & (i < {size})",
        *k.loop,
        f"tl.store({k.use(f'{step.name}_ptr')} + group, {reduced}, mask=group < {groups})",
    ]
    if p.is_encode and k.knows("gather", GRADIENT):
        k.use("status_ptr")
        k.end += [f"worst = tl.abs({GRADIENT})", *REPORT]
    return k
