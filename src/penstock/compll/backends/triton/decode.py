"""Kernels that decode alone has: the check of sizes and scalars, and what writes the gradient.

The host cannot look at a payload on the device without waiting, so kernels look: at the header, byte by byte, at every
count and every scalar, before anything behind it is believed. What is wrong sets a bit of `status`, and nothing that
hangs on it is written.
"""

from collections.abc import Mapping

from penstock.compll.backends.triton.expr import Kernel
from penstock.compll.backends.triton.procedure import Procedure
from penstock.compll.functions import Function
from penstock.compll.ir import NUMEL
from penstock.compll.lower.passes import Pass, Scatter
from penstock.compll.types import Vector

Functions = Mapping[str, Function]
START = [
    "valid = numel >= 0",
    "if HEADER > 0:",
    "    valid = same_bytes(payload_ptr - HEADER, header_ptr, HEADER)",
]
WRONG = ["if valid == 0:", "    tl.atomic_or(status_ptr, WRONG_FIELD)"]


def write_check(p: Procedure, functions: Functions) -> Kernel:
    """Return the kernel that looks at every size and scalar before anything else does."""
    summary = "Sizes and scalars of the payload: only what encode can have written."
    k = Kernel("decode_check", summary, functions=functions)
    for argument in ("payload_ptr", "header_ptr", "scalars_ptr", "status_ptr", "nbytes", "numel"):
        k.use(argument)
    k.use_constants("HEADER")
    k.head += START
    fields = p.program.layout.fields
    for number, item in enumerate(fields):
        if item.counts:
            _check_count(k, p, number, item.counts)
    k.head.append(f"valid = valid & ({k.offset(p, len(fields))} <= nbytes)")
    k.head += _scalar_checks(k, p)
    k.head.append(f"tl.store(scalars_ptr + {p.slots['valid']}, valid.to(tl.int32))")
    k.head += WRONG
    for item in fields:
        if item.counts:  # nothing that follows may trust a payload that is damaged elsewhere
            slot, size = p.slots[f"{item.counts}.size"], k.known["size", item.counts]
            k.head.append(f"tl.store(scalars_ptr + {slot}, tl.where(valid, {size}, 0))")
    return k


def _check_count(k: Kernel, p: Procedure, number: int, vector: str) -> None:
    offset, size = k.offset(p, number), k.fresh(f"{vector}_size")
    k.head += [
        f"valid = valid & ({offset} + 4 <= nbytes)",
        f"{size} = load_scalar(payload_ptr + tl.where(valid, {offset}, 0), 4)",
        f"valid = valid & ({size} >= 0) & ({size} <= numel)",
        f"{size} = tl.where(valid, {size}, 0)",
    ]
    k.known["size", vector] = size


def _scalar_checks(k: Kernel, p: Procedure) -> list[str]:
    """Return the tests that scalar fields must pass."""
    lines: list[str] = []
    held, k.head = k.head, []
    expected = dict(p.program.decode.checks)
    for number, item in enumerate(p.program.layout.fields):
        if isinstance(item.type, Vector) or item.counts:
            continue
        if number in expected:
            found = k.field(p, number)
            lines.append(f"valid = valid & ({found} == {k.text(p, expected[number], 'scalar')})")
        elif item.type.is_float:
            lines.append(f"valid = valid & is_finite({k.field(p, number)})")
        elif item.type.bits < 8:
            lines.append(f"valid = valid & ({k.field(p, number)} <= {item.type.high})")
    written, k.head = k.head, held
    return [*written, *lines]


def write_result(p: Procedure, vector: str, is_checked: bool, functions: Functions) -> Kernel:
    """Return the kernel that writes the gradient or adds to it; `is_checked` where another kernel has looked before."""
    summary = "The gradient, written to `out` or added to it `factor` times."
    k = Kernel("decode", summary, functions=functions, over=NUMEL)
    for argument in ("payload_ptr", "header_ptr", "out_ptr", "status_ptr", "factor", "numel"):
        k.use(argument)
    k.use_constants("HEADER", "ADD")
    value = k.element(p, vector, "tile")
    k.loop += [
        f"value = {value}",
        "if ADD:",
        "    value = load(out_ptr, i, numel, full).to(tl.float32) + factor * value",
        "store(out_ptr, i, value, numel, full)",
    ]
    if is_checked:
        k.head.append(f"valid = tl.load({k.use('scalars_ptr')} + {p.slots['valid']}) != 0")
    else:
        scalars, k.head = k.head, list(START)
        checks = _scalar_checks(k, p)
        k.head += [*scalars, *checks, *WRONG]
    k.head.append("trusted = tl.where(valid, numel, 0)")
    k.loop_over("trusted", [], "One tile of the gradient.")
    return k


def write_scatter(p: Procedure, name: str, step: Pass, output: Scatter, functions: Functions) -> Kernel:
    """Return the kernel that puts values at indices, or adds them there; an index outside is reported and skipped."""
    summary = f"{output.values} at {output.indices}, written to `out` or added to it `factor` times."
    k = Kernel(name, summary, functions=functions, over=step.length)
    size = k.size(p, step.length)
    for argument in ("out_ptr", "status_ptr", "factor", "numel"):
        k.use(argument)
    k.use_constants("ADD")
    k.head.append("wrong = tl.zeros([BLOCK // ROW, ROW], tl.int32)")
    index, value = k.element(p, output.indices, "tile"), k.element(p, output.values, "tile")
    k.loop += [
        f"good = ({index} >= 0) & ({index} < numel) & is_finite({value})",
        f"wrong = wrong | ((i < {size}) & (good == 0)).to(tl.int32)",
        f"good = good & (i < {size})",
        f"value = {value}",
        "if ADD:",
        f"    value = tl.load(out_ptr + {index}, mask=good, other=0).to(tl.float32) + factor * value",
        f"tl.store(out_ptr + {index}, value.to(out_ptr.dtype.element_ty), mask=good)",
    ]
    k.loop_over(size, ["wrong"], summary)
    k.end += ["if tl.max(wrong) != 0:", "    tl.atomic_or(status_ptr, WRONG_INDEX)"]
    return k
