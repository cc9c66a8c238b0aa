"""Reads torch's own clocks: what the last iteration of its wrapper was made of."""

from torch.nn.parallel import DistributedDataParallel

from penstock.timeline import COMPUTE, Span, Timeline

NETWORK = "network"
_NANO = 1e-9


def stock_timeline(wrapper: DistributedDataParallel) -> Timeline | None:
    """Return the last iteration of torch's wrapper on this rank; None where torch has timed none yet.

    Its reducer times the forward pass, the backward pass, and the stretch from the first bucket that is sent to the
    last that has arrived.
    """
    assert wrapper.logger is not None
    wrapper.logger.set_runtime_stats_and_log()
    data = wrapper._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    if "backward_compute_time" not in data:
        return None
    rank = wrapper.process_group.rank()
    forward = data["forward_compute_time"] * _NANO
    end = forward + data["backward_compute_time"] * _NANO
    start = max(0.0, end - data["backward_compute_comm_overlap_time"] * _NANO)
    return Timeline(
        (
            Span("forward", COMPUTE, 0.0, forward, rank),
            Span("backward", COMPUTE, forward, end, rank),
            Span("all buckets", NETWORK, start, start + data["backward_comm_time"] * _NANO, rank),
        )
    )


def communication_seconds(timeline: Timeline) -> float:
    """Return the time from the first message to the last arrival."""
    spans = [span for span in timeline.spans if span.lane != COMPUTE]
    if not spans:
        return 0.0
    return max(span.end_seconds for span in spans) - min(span.start_seconds for span in spans)
