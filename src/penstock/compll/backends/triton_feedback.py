"""Error feedback inside a kernel: the load of the gradient, with what earlier steps did not send.

v = gradient + (residual - decode(last payload)) is what is encoded, and is left in the residual's memory; the payload
of v is taken off by the next step (`codecs/feedback.py` says why). `FEEDBACK` and `LAST` are constants of the kernel:
without them it is the plain encode.
"""

from penstock.compll.backends.triton_expr import Kernel
from penstock.compll.backends.triton_procedure import Procedure
from penstock.compll.ir import GRADIENT


def load_with_feedback(k: Kernel, last: Procedure | None) -> None:
    """Write the load of the gradient; `last` is the decode of the payload before, where it can be inlined."""
    gradient, residual = k.use("gradient_ptr"), k.use("residual_ptr")
    k.use_constants("FEEDBACK")
    k.loop.append(f"latest = load({gradient}, i, numel, full).to(tl.float32)")
    k.loop += ["gradient = latest", "if FEEDBACK:", f"    kept = load({residual}, i, numel, full)"]
    if last is not None:
        _take_off(k, last)
    k.loop += ["    gradient = latest + kept", f"    store({residual}, i, gradient, numel, full)"]
    k.used |= {"gradient", "latest", "kept"}
    k.known["tile", GRADIENT] = "gradient"


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
