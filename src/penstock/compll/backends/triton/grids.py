"""The kernel of one pass: maps in registers, reductions carried from tile to tile, vectors and fields stored."""

from collections.abc import Mapping, Sequence

from penstock.compll.backends.triton.expr import Kernel
from penstock.compll.backends.triton.feedback import load_with_feedback, settle
from penstock.compll.backends.triton.fold import fold_end, fold_part, fold_step
from penstock.compll.backends.triton.procedure import Procedure
from penstock.compll.backends.triton.text import limit, register
from penstock.compll.functions import Function
from penstock.compll.ir import Expr, Reduce, Statement
from penstock.compll.lower.passes import Keep, Pack, Pass
from penstock.compll.lower.show import show
from penstock.compll.types import Scalar

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
    """Return what a reduction comes to, from the parts that programs left."""
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
