"""The operations of codecs as calls ready to be timed: ours, and the same in torch, eager and compiled."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from penstock.bench.codec_peers import PEERS, TAU, Inputs
from penstock.codecs.dense.codec import Codec
from penstock.codecs.feedback import Residual
from penstock.codecs.registry import make_codec

Call = Callable[[], Any]
SPECS = {
    "onebit": "onebit",
    "tbq": f"tbq(tau={TAU})",
    "terngrad": "terngrad(bitwidth=2)",
    "topk": "topk(density=0.001)",
    "dgc": "dgc(density=0.001)",
    "signsgd": "signsgd",
    "qsgd": "qsgd(bits=4)",
    "blocks": "blocks(bits=4)",
    "graddrop": "graddrop(density=0.001)",
    "adacomp": "adacomp",
    "3lc": "3lc",
    "fp16": "fp16",
    "bf16": "bf16",
    "fp8": "fp8",
}
SELECT = ("select", "topk")  # the k largest magnitudes alone, without a payload


def make_calls(
    implementations: Sequence[str], codec: str, operation: str, inputs: Inputs
) -> tuple[dict[str, Call], dict[str, str]]:
    """Return what can be timed, and why the rest cannot."""
    calls: dict[str, Call] = {}
    failed: dict[str, str] = {}
    for name in implementations:
        if name != "penstock" and (codec, operation) not in (*PEERS, SELECT):
            continue
        try:
            calls[name] = _make(name, codec, operation, inputs)
        except Exception as error:  # a peer that cannot run is a row that says so; our own failure is a failure
            if name == "penstock":
                raise
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return calls, failed


def _make(implementation: str, codec: str, operation: str, inputs: Inputs) -> Call:
    if implementation == "penstock":
        return _select(inputs) if codec == "select" else _penstock(codec, operation, inputs)
    if codec == "select":
        codec, operation = "topk", "encode"
    if implementation == "eager":
        return PEERS[codec, operation](inputs, lambda function: function)
    call = PEERS[codec, operation](inputs, torch.compile)
    call()  # compiles, or says why it cannot
    return call


def _select(inputs: Inputs) -> Call:
    """The k largest magnitudes alone, without a payload."""
    k = inputs.gradient.numel() // 1000
    if not inputs.gradient.is_cuda:
        from penstock.compll.select import largest_magnitudes

        values = inputs.gradient.numpy()
        return lambda: largest_magnitudes(values, k)
    from penstock.compll.backends.triton.select import select_on_current_stream

    call: Call = select_on_current_stream(inputs.gradient, k)
    return call


def _penstock(name: str, operation: str, inputs: Inputs) -> Call:
    codec = make_codec(SPECS[name])
    gradient, numel = inputs.gradient, inputs.gradient.numel()
    if gradient.is_cuda:
        out = torch.empty(codec.max_nbytes(numel), dtype=torch.uint8, device=gradient.device)
        return _call(codec, operation, gradient, inputs.total, out)
    return _call(codec, operation, gradient.numpy(), inputs.total.numpy(), np.empty(codec.max_nbytes(numel), np.uint8))


def _call(codec: Codec, operation: str, gradient: Any, total: Any, out: Any) -> Call:
    nbytes = codec.encode(gradient, None, out)
    payload = out[:nbytes]
    residual = Residual(total * 0)
    operations: dict[str, Call] = {
        "encode": lambda: codec.encode(gradient, None, out),
        "encode_feedback": lambda: codec.encode(gradient, residual, out),
        "decode": lambda: codec.decode(payload, total),
        "decode_add": lambda: codec.decode_add(payload, total),
    }
    return operations[operation]
