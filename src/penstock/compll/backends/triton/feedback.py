"""Error feedback inside a kernel: the load of the gradient, with what earlier steps did not send.

v = gradient + (residual - decode(last payload)) is what is encoded, and is left in the residual's memory; the payload
of v is taken off by the next step (`codecs/feedback.py` says why). Where one kernel does all of encode, it can also
take it off at once, from the codes it has just made (`SETTLE`). `FEEDBACK`, `LAST` and `SETTLE` are constants of the
kernel: without them it is the plain encode.
"""

from collections.abc import Sequence

from penstock.compll.backends.triton.expr import Kernel
from penstock.compll.backends.triton.procedure import Procedure
from penstock.compll.ir import GRADIENT, Statement
from penstock.compll.lower.passes import TOTAL


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
    """Write what leaves in the residual what is not sent; `statements` decode what encode has computed, `left` last."""
    k.use_constants("SETTLE")
    p.add(statements)
    k.known["tile", TOTAL] = "gradient"
    outer, k.loop = k.loop, []
    left = k.element(p, statements[-1].name, "tile")
    lines, k.loop = k.loop, outer
    lines.append(f"store({k.use('residual_ptr')}, i, {left}, numel, full)")
    k.loop += ["if FEEDBACK:", "    if SETTLE:", *(f"        {line}" for line in lines)]


def _take_off(k: Kernel, last: Procedure) -> None:
    """Write what the last payload carried off the residual, inside `if FEEDBACK: if LAST:`."""
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
