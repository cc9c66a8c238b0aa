"""What a compressor costs, as curves that can be measured and written down.

All curves are of the *dense* bytes of a gradient: what decoding takes is said per byte of the gradient that comes out,
not per byte of the payload that goes in, so that sizes of one kind stand everywhere.
"""

import math
from dataclasses import dataclass
from typing import Any

from penstock.errors import NetworkError
from penstock.fields import Fields


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds for a number of bytes: a line that never falls below a floor, as launches and latencies make it."""

    seconds_per_byte: float
    startup_seconds: float
    floor_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("seconds_per_byte", "startup_seconds", "floor_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise NetworkError(f"curve: {name} is {value}; wanted a finite number >= 0")

    def seconds(self, nbytes: float) -> float:
        """Return the time for `nbytes`."""
        return max(self.floor_seconds, self.startup_seconds + self.seconds_per_byte * nbytes)

    @property
    def least_seconds(self) -> float:
        """What a call takes however little it is given."""
        return max(self.floor_seconds, self.startup_seconds)


@dataclass(frozen=True, slots=True)
class CodecCurves:
    """A codec as its cost curves show it."""

    ratio: float  # payload bytes / dense bytes, of large gradients
    encode: Curve  # of the dense bytes, error feedback included
    decode: Curve  # of the dense bytes
    decode_add: Curve | None = None  # decoding and merging in one pass; None: as long as `decode`
    fixed_nbytes: float = 0.0  # of every payload, however small: its header
    block_merge: Curve | None = None  # adding one payload to another without decoding; None: it cannot be done

    def __post_init__(self) -> None:
        for name in ("ratio", "fixed_nbytes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise NetworkError(f"codec curves: {name} is {value}; wanted a finite number >= 0")

    @property
    def merge(self) -> Curve:
        """Decoding a payload into a sum."""
        return self.decode if self.decode_add is None else self.decode_add

    def payload_nbytes(self, nbytes: float) -> float:
        """Return the bytes on the wire for `nbytes` of gradient."""
        return self.fixed_nbytes + self.ratio * nbytes


_CURVE = ("seconds_per_byte", "startup_seconds", "floor_seconds")
_CODEC = ("ratio", "fixed_nbytes", "encode", "decode", "decode_add", "block_merge")


def codec_curves_from_fields(fields: Fields) -> CodecCurves:
    """Build curves from one entry of a network file's `codecs`."""
    fields.reject_unknown(_CODEC)
    merge, block_merge = fields.optional_member("decode_add"), fields.optional_member("block_merge")
    return CodecCurves(
        ratio=fields.amount("ratio"),
        encode=_curve(fields.member("encode")),
        decode=_curve(fields.member("decode")),
        decode_add=None if merge is None else _curve(merge),
        fixed_nbytes=fields.amount("fixed_nbytes", 0.0),
        block_merge=None if block_merge is None else _curve(block_merge),
    )


def _curve(fields: Fields) -> Curve:
    fields.reject_unknown(_CURVE)
    return Curve(fields.amount("seconds_per_byte"), fields.amount("startup_seconds"), fields.amount("floor_seconds", 0))


def codec_curves_document(curves: CodecCurves) -> dict[str, Any]:
    """Return the curves as one entry of a network file's `codecs`."""
    document = {
        "ratio": curves.ratio,
        "fixed_nbytes": curves.fixed_nbytes,
        "encode": _curve_document(curves.encode),
        "decode": _curve_document(curves.decode),
    }
    optional = {"decode_add": curves.decode_add, "block_merge": curves.block_merge}
    return document | {name: _curve_document(curve) for name, curve in optional.items() if curve is not None}


def _curve_document(curve: Curve) -> dict[str, float]:
    return {name: getattr(curve, name) for name in _CURVE}
