"""Plans as the report shows them: every tensor with its bucket and its bytes, every bucket with its way and colour."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from penstock.curves import CodecCurves, Curve
from penstock.plan import Bucket, Plan
from penstock.report.found_runs import FoundRun
from penstock.run_record import CodecCost, RouteUse, RunRecord
from penstock.timeline import COMPUTE, Timeline, bucket_of
from penstock.trace import Trace

BUCKET_COLOURS = ("#4c78a8", "#d9720a", "#54a24b", "#e45756", "#3f8f89", "#b279a2", "#a8861a", "#9d755d")  # in turn


def bucket_colours(plans: Iterable[Plan], timelines: Iterable[Timeline]) -> dict[str, str]:
    """Return the colour of each bucket, for all pictures of a report: by its name, in the order of the plans.

    Buckets that stand in a timeline only, as torch's own, follow as they start.
    """
    names = [message.name for plan in plans for message in plan.messages]
    for timeline in timelines:
        spans = sorted((span for span in timeline.spans if span.lane != COMPUTE), key=lambda span: span.start_seconds)
        names += [bucket_of(span.name) for span in spans]
    return {name: BUCKET_COLOURS[at % len(BUCKET_COLOURS)] for at, name in enumerate(dict.fromkeys(names))}


def report_colours(runs: Iterable[FoundRun]) -> dict[str, str]:
    """Return the colours of all buckets of a report."""
    records = [run.record for run in runs]
    plans = [record.plan for record in records if record.plan is not None]
    timelines = [each for record in records for each in (record.predicted, record.measured) if each is not None]
    return bucket_colours(plans, timelines)


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


def plan_view(run: FoundRun) -> dict[str, Any] | None:
    """Return what is drawn of a run's plan; None where it has none. Without a trace, tensors have no known sizes."""
    plan, trace = run.record.plan, run.record.trace
    if plan is None:
        return None
    if trace is not None:
        plan.check_against(trace)
    codecs = run_codecs(run.record)
    return {
        "name": run.name,
        "about": " ".join([_about(plan), *_used(run.record.routes_used)]),
        "tensors": [] if trace is None else _tensors(plan, trace, codecs),
        "buckets": [
            _bucket(index, bucket, codecs) | {"message": message}
            for index, (bucket, message) in enumerate(zip(plan.buckets, _message_names(plan), strict=True))
        ],
    }


def _about(plan: Plan) -> str:
    tensors = sum(len(bucket.tensors) for bucket in plan.buckets)
    total = sum(bucket.nbytes for bucket in plan.buckets)
    sent = f" that travel as {len(plan.messages)} messages," if plan.bulks else ""
    return (
        f"{tensors} tensors, {total / 1e6:.4g} MB of gradients, in {len(plan.buckets)} buckets{sent} by planner "
        f"{plan.planner} for {plan.workers} workers; {plan.times} times; hash {plan.hash}."
    )


def _used(routes: Sequence[RouteUse]) -> Iterator[str]:
    """Say how the last iteration really went, beside the plan."""
    for each in routes:
        yield (
            f"The last iteration sent {each.sent_nbytes / 1e6:.4g} MB for {each.nbytes / 1e6:.4g} MB of gradients by "
            f"{each.route}, in {each.messages} messages."
        )


def _message_names(plan: Plan) -> list[str]:
    """Return for each bucket the name of the message that it travels in, which is its own outside of bulks."""
    counts = plan.bulks or (1,) * len(plan.buckets)
    return [message.name for message, count in zip(plan.messages, counts, strict=True) for _ in range(count)]


def _tensors(plan: Plan, trace: Trace, codecs: Mapping[str, CodecCurves]) -> list[dict[str, Any]]:
    bucket_of = {name: index for index, bucket in enumerate(plan.buckets) for name in bucket.tensors}
    found = []
    for tensor, nbytes in zip(trace.tensors, trace.nbytes, strict=True):
        index = bucket_of[tensor.name]
        encoded = _encoded(nbytes, plan.buckets[index].codec, codecs)
        found.append({"name": tensor.name, "nbytes": nbytes, "bucket": index, "encoded_nbytes": encoded})
    return found


def _bucket(index: int, bucket: Bucket, codecs: Mapping[str, CodecCurves]) -> dict[str, Any]:
    codec = f", {bucket.codec}" if bucket.codec else ", as it is"
    partitions = f", {bucket.partitions} partitions" if bucket.partitions > 1 else ""
    return {
        "index": index,
        "name": bucket.name,
        "tensors": len(bucket.tensors),
        "nbytes": bucket.nbytes,
        "encoded_nbytes": _encoded(bucket.nbytes, bucket.codec, codecs),
        "how": f"{bucket.strategy}{codec}{partitions}",
    }


def _encoded(nbytes: int, codec: str | None, codecs: Mapping[str, CodecCurves]) -> float | None:
    """Return the predicted bytes of a payload; None for dense buckets and for codecs that were not measured."""
    return codecs[codec].payload_nbytes(nbytes) if codec is not None and codec in codecs else None
