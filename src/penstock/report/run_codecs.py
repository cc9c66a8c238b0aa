"""The codecs whose costs a run knows, as curves of the dense bytes."""

from penstock.curves import CodecCurves, Curve
from penstock.run_record import CodecCost, RunRecord


def run_codecs(record: RunRecord) -> dict[str, CodecCurves]:
    """Return the curves that the run's network holds, and those of its own codec cost where there are no others."""
    known = {} if record.network is None else dict(record.network.codecs)
    if record.codec is not None and record.codec_cost is not None:
        known.setdefault(record.codec, _curves(record.codec_cost))
    return known


def _curves(cost: CodecCost) -> CodecCurves:
    """Return a run's codec cost as curves: it counts decoding by compressed bytes, curves by dense ones."""
    encode, decode = cost.encode, cost.decode
    return CodecCurves(
        ratio=cost.ratio,
        encode=Curve(encode.seconds_per_byte, encode.startup_seconds),
        decode=Curve(decode.seconds_per_byte * cost.ratio, decode.startup_seconds),
    )
