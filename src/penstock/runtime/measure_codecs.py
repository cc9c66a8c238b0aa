"""Measures what codecs cost on this machine: encode, decode and decode-and-add, each as a curve of the dense bytes.

Ranks measure together, as they will compress together: four workers on two cores take turns, and the curves say so.
Gradients are Gaussian, since a codec that looks for large values takes its time from them; encoding includes error
feedback, as training does.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from penstock.codecs.codec import Codec, Floats
from penstock.cost.fit import Points, fit_measured
from penstock.curves import CodecCurves, Curve
from penstock.runtime.timed import largest
from penstock.runtime.transport import Bytes, Transport

NUMELS = tuple(1 << exponent for exponent in range(10, 23, 2))  # 4 KiB to 16 MiB of float32
_FEW_NUMELS = (1 << 10, 1 << 16, 1 << 20)  # where less than `_SHORT` seconds are allowed: values are made for each
_SHORT = 0.5
_ITEMSIZE = 4
_LEAST, _MOST = 1, 20  # calls of a timed block
_BLOCKS, _FEW_BLOCKS = 5, 3  # of each size and operation, of which the median counts: a busy machine spoils one or two


def measure_codecs(
    specs: Sequence[str], transport: Transport | None = None, seconds: float = 1.0
) -> dict[str, CodecCurves]:
    """Return the curves of each codec, measured in about `seconds` each.

    With a transport every rank must call this at the same time, and all return the same curves: the slowest rank's.
    """
    from penstock.codecs.registry import make_codec

    codecs = {spec: make_codec(spec) for spec in specs}
    return {spec: _measure(codecs[spec], transport, seconds) for spec in specs}


def _measure(codec: Codec, transport: Transport | None, seconds: float) -> CodecCurves:
    numels, blocks = (_FEW_NUMELS, _FEW_BLOCKS) if seconds < _SHORT else (NUMELS, _BLOCKS)
    operations = {numel: dict(_operations(codec, numel)) for numel in numels}
    names = tuple(operations[numels[0]])
    share = seconds / len(numels) / len(names) / blocks

    def points(name: str) -> Points:
        return [
            (float(_ITEMSIZE * numel), _agreed_seconds(operations[numel][name], transport, share, blocks))
            for numel in numels
        ]

    curves = {name: _curve(partial(points, name), f"{codec.name}: {name} times") for name in names}
    ratio, fixed_nbytes = _payload_line(codec, numels)
    return CodecCurves(ratio=ratio, fixed_nbytes=fixed_nbytes, **curves)


def _operations(codec: Codec, numel: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    from penstock.codecs.feedback import Residual

    gradient, residual, out = (_gradient(numel) for _ in range(3))
    payload = np.zeros(codec.max_nbytes(numel), np.uint8)
    kept = Residual(residual) if codec.capabilities.deferred_feedback else residual
    yield "encode", lambda: codec.encode(gradient, kept, payload)
    packed = _packed(codec, gradient)  # memory of its own: what the timed encodes write may be longer
    yield "decode", lambda: codec.decode(packed, out)
    yield "decode_add", lambda: codec.decode_add(packed, out)
    if codec.capabilities.merging:
        other, merged = _packed(codec, _gradient(numel + 1)[1:]), np.zeros_like(payload)

        def merge() -> None:
            merged[: len(packed)] = packed
            codec.merge(other, merged, residual)

        yield "block_merge", merge


def _packed(codec: Codec, gradient: Floats) -> Bytes:
    """Return the payload of a gradient, as long as it is."""
    payload = np.zeros(codec.max_nbytes(len(gradient)), np.uint8)
    return payload[: codec.encode(gradient, None, payload)]


def _gradient(numel: int) -> Floats:
    """Return Gaussian values, as a gradient has them."""
    return np.random.default_rng(numel).standard_normal(numel, np.float32)


def _agreed_seconds(run: Callable[[], Any], transport: Transport | None, budget: float, blocks: int) -> float:
    """Return what a call takes, the slowest rank's; a first one compiles and is not counted. A block has a `budget`."""
    _timed(run, 1)
    pilot = _slowest(transport, _timed(run, 1))
    calls = min(max(int(budget / max(pilot, 1e-9)), _LEAST), _MOST)
    return max(median(_slowest(transport, _timed(run, calls)) for _ in range(blocks)), 1e-9)


def _timed(run: Callable[[], Any], calls: int) -> float:
    start = perf_counter()
    for _ in range(calls):
        run()
    return (perf_counter() - start) / calls


def _slowest(transport: Transport | None, seconds: float) -> float:
    """Return the slowest rank's time; also a barrier."""
    return seconds if transport is None else largest(transport, seconds)


def _curve(measure: Callable[[], Points], what: str) -> Curve:
    """Fit a line, with the least that was measured as its floor."""
    fit = fit_measured(measure, what)
    return Curve(fit.line.b_seconds_per_byte, fit.line.a_seconds, fit.least_seconds)


def _payload_line(codec: Codec, numels: Sequence[int]) -> tuple[float, float]:
    """Return payload bytes per dense byte, and the bytes that every payload has: those of Gaussian values."""
    small, large = numels[0], numels[-1]
    less, more = (_payload_nbytes(codec, numel) for numel in (small, large))
    ratio = max(0.0, more - less) / (_ITEMSIZE * (large - small))
    return ratio, max(0.0, less - ratio * _ITEMSIZE * small)


def _payload_nbytes(codec: Codec, numel: int) -> int:
    return codec.encode(_gradient(numel), None, np.zeros(codec.max_nbytes(numel), np.uint8))
