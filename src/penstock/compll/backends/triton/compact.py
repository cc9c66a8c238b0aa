"""Kernels of filters and of reductions over groups of neighbours.

A filter is two kernels: one bit for each element that is kept and how many there are, then the elements in order.
"""

from collections.abc import Mapping

from penstock.compll.backends.triton.expr import Kernel
from penstock.compll.backends.triton.grids import REPORT, WORST, WORST_START
from penstock.compll.backends.triton.procedure import Procedure
from penstock.compll.backends.triton.text import limit, register
from penstock.compll.functions import Function
from penstock.compll.ir import GRADIENT, Filter, GroupReduce

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
