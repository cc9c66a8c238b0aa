"""The measured timeline of an iteration, from torch's own clocks and from those of the communication thread.

torch's reducer times the forward pass, the backward pass and the stretch from the first bucket that is sent to the last
that arrives, on CUDA by events. What each bucket took is known where our communication thread sent it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.exchange.traffic import Sent
from penstock.runtime.recorder import Recorder
from penstock.timeline import COMPUTE, Span, Timeline

NETWORK = "network"
_NANO = 1e-9


def measured_timeline(
    data: Mapping[str, Any], sent: Sequence[Sent], origin_seconds: float, rank: int, notes: Recorder | None = None
) -> Timeline | None:
    """Return the iteration that `data`, torch's logging data, is about; None where torch has timed none yet.

    `origin_seconds` is when its forward pass started, on the clock of `sent`. Instructions that `notes` holds stand in
    lanes of their own beside the buckets.
    """
    if "backward_compute_time" not in data:
        return None
    forward = data["forward_compute_time"] * _NANO  # to the start of the backward pass
    end = forward + data["backward_compute_time"] * _NANO
    spans = [Span("forward", COMPUTE, 0.0, forward, rank), Span("backward", COMPUTE, forward, end, rank)]
    if sent:
        since = [(each.name, each.start_seconds - origin_seconds, each.end_seconds - origin_seconds) for each in sent]
        spans += [Span(name, NETWORK, max(start, 0.0), max(stop, 0.0), rank) for name, start, stop in since]
        spans += notes.timeline(origin_seconds, [each.name for each in sent]).spans if notes is not None else ()
    else:
        start = max(0.0, end - data["backward_compute_comm_overlap_time"] * _NANO)
        spans.append(Span("all buckets", NETWORK, start, start + data["backward_comm_time"] * _NANO, rank))
    return Timeline(tuple(spans))


def communication_seconds(timeline: Timeline) -> float:
    """Return the time from the first message to the last arrival: predicted and measured alike."""
    spans = [span for span in timeline.spans if span.lane != COMPUTE]
    if not spans:
        return 0.0
    return max(span.end_seconds for span in spans) - min(span.start_seconds for span in spans)
