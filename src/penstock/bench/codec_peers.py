"""The compressors written in plain torch: what a training script would use without penstock, eager or compiled.

The same algorithms and the same packed results, on any device. `PEERS` has a function for each codec and operation that
makes one ready to call; outputs are returned, not kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor
Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a peer works on."""

    gradient: Tensor
    residual: Tensor
    total: Tensor  # what is added to


def pack(values: Tensor, bits: int) -> Tensor:
    """Return `bits`-bit values packed from the low bit up."""
    lanes = values.to(torch.uint8).view(-1, 8 // bits)
    shifts = torch.arange(0, 8, bits, device=values.device, dtype=torch.uint8)
    return (lanes << shifts).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the values that `pack` packed."""
    shifts = torch.arange(0, 8, bits, device=packed.device, dtype=torch.uint8)
    return ((packed[:, None] >> shifts) & ((1 << bits) - 1)).view(-1)


def onebit(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Signs, and the mean of the values of each sign."""
    up = x >= 0
    count = up.sum()
    mean_up = torch.where(up, x, 0).sum() / count.clamp(min=1)
    mean_down = torch.where(up, 0, x).sum() / (x.numel() - count).clamp(min=1)
    return pack(up, 1), mean_up, mean_down


def onebit_feedback(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same of x + residual; the error stays in `residual`."""
    total = x + residual
    bits, up, down = onebit(total)
    residual.copy_(total - torch.where(total >= 0, up, down))
    return bits, up, down


def onebit_back(bits: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The values."""
    return torch.where(unpack(bits, 1) != 0, up, down)


def tbq(x: Tensor, tau: float) -> Tensor:
    """1 above tau, 2 below -tau, else 0."""
    return pack((x >= tau).to(torch.uint8) + 2 * (x <= -tau).to(torch.uint8), 2)


def tbq_back(codes: Tensor, tau: float) -> Tensor:
    """The values."""
    code = unpack(codes, 2)
    return torch.where(code == 1, tau, torch.where(code == 2, -tau, 0.0))


def terngrad(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Four levels between the smallest and the greatest value, rounded at random."""
    low, high = x.min(), x.max()
    levels = ((x - low) / ((high - low) / 3) + torch.rand_like(x)).floor().clamp(0, 3)
    return pack(levels, 2), low, high


def terngrad_back(codes: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The values."""
    return low + unpack(codes, 2).to(torch.float32) * ((high - low) / 3)


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest magnitudes."""
    indices = torch.topk(x.abs(), k).indices
    return indices, x[indices]


def dgc(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """A sampled threshold, then at most k of what reaches it."""
    sample = x[torch.randint(x.numel(), (65536,), device=x.device)].abs()
    threshold = torch.topk(sample, max(1, 65536 * k // x.numel())).values[-1]
    candidates = (x.abs() >= threshold).nonzero().view(-1)
    values = x[candidates]
    best = torch.topk(values.abs(), min(k, values.numel())).indices
    return candidates[best], values[best]


def _decoder(encode: Callable[..., Any], decode: Callable[..., Tensor], adds: bool) -> Callable[[Inputs, Any], Call]:
    def make(inputs: Inputs, wrap: Any) -> Call:
        payload = encode(inputs.gradient)
        payload = payload if isinstance(payload, tuple) else (payload,)
        if adds:
            added = wrap(lambda *fields: inputs.total.add_(decode(*fields)))
            return lambda: added(*payload)
        decoded = wrap(decode)
        return lambda: decoded(*payload)

    return make


def _encoder(function: Callable[..., Any]) -> Callable[[Inputs, Any], Call]:
    def make(inputs: Inputs, wrap: Any) -> Call:
        encode = wrap(function)
        return lambda: encode(inputs.gradient)

    return make


def _feedback(inputs: Inputs, wrap: Any) -> Call:
    encode = wrap(onebit_feedback)
    return lambda: encode(inputs.gradient, inputs.residual)


TAU = 1.0
PEERS: dict[tuple[str, str], Callable[[Inputs, Any], Call]] = {
    ("onebit", "encode"): _encoder(onebit),
    ("onebit", "encode_feedback"): _feedback,
    ("onebit", "decode"): _decoder(onebit, onebit_back, adds=False),
    ("onebit", "decode_add"): _decoder(onebit, onebit_back, adds=True),
    ("tbq", "encode"): _encoder(lambda x: tbq(x, TAU)),
    ("tbq", "decode"): _decoder(lambda x: tbq(x, TAU), lambda codes: tbq_back(codes, TAU), adds=False),
    ("terngrad", "encode"): _encoder(terngrad),
    ("terngrad", "decode"): _decoder(terngrad, terngrad_back, adds=False),
    ("topk", "encode"): _encoder(lambda x: topk(x, x.numel() // 1000)),
    ("dgc", "encode"): _encoder(lambda x: dgc(x, x.numel() // 1000)),
}
