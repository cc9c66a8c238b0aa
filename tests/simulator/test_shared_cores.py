"""Messages that are slower while gradients are computed, against a walk along the clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cost.ways import Way
from penstock.network import LinearCost
from penstock.planners import PLANNERS
from penstock.simulator.iteration import predict, squeezed, stretched
from penstock.trace import Tensor, Trace

times = st.floats(0, 10)
lines = st.builds(LinearCost, st.floats(0, 5), st.floats(0, 1e-3))
slowdowns = st.floats(1, 8)
traces = st.builds(
    lambda forward, tensors: Trace(
        "random", "none", 1, "float32", forward, tuple(Tensor(f"t{i}", n, t) for i, (n, t) in enumerate(tensors))
    ),
    times,
    st.lists(st.tuples(st.integers(0, 5000), times), min_size=1, max_size=6),
)


def sent(start, seconds, computed, slowdown):
    """Return when a message has arrived that takes `seconds` by itself: first slowly, then at full speed."""
    slowly = max(0.0, computed - start)
    if seconds * slowdown <= slowly:
        return start + seconds * slowdown
    return start + slowly + seconds - slowly / slowdown


def test_a_message_half_sent_when_computing_ends_goes_on_twice_as_fast():
    trace = Trace("drawn", "none", 1, "float32", 1.0, (Tensor("a", 1, 1.0), Tensor("b", 1, 2.0)))
    plan = predict(trace, PLANNERS["wfbp"], [Way("w", (LinearCost(2.0, 0.0),))], 2, slowdown=2.0)
    spans = {(span.name, span.lane): (span.start_seconds, span.end_seconds) for span in plan.timeline.spans}
    assert spans == {
        ("forward", "compute"): (0.0, 1.0),
        ("a", "compute"): (1.0, 2.0),
        ("b", "compute"): (2.0, 4.0),
        ("a", "network"): (2.0, 5.0),
        ("b", "network"): (5.0, 7.0),
    }
    assert (plan.iteration_seconds, plan.non_overlapped_seconds) == (7.0, 3.0)


@given(traces, lines, slowdowns)
def test_every_message_takes_as_long_as_a_walk_along_the_clock_says(trace, line, slowdown):
    plan = predict(trace, PLANNERS["wfbp"], [Way("w", (line,))], 2, slowdown)
    arrived = 0.0
    for span, ready, nbytes in zip(plan.timeline.lane("network"), trace.ready_seconds, trace.nbytes, strict=True):
        start = max(arrived, ready)
        arrived = sent(start, line.seconds(nbytes), trace.compute_seconds, slowdown)
        assert span.start_seconds == pytest.approx(start, rel=1e-6, abs=1e-6)
        assert span.end_seconds == pytest.approx(arrived, rel=1e-6, abs=1e-6)
    assert plan.timeline.compute_seconds == pytest.approx(trace.compute_seconds)


@given(traces, lines, slowdowns)
def test_a_slowdown_changes_times_and_no_plan(trace, line, slowdown):
    alone, shared = (predict(trace, PLANNERS["exact"], [Way("w", (line,))], 2, each) for each in (1.0, slowdown))
    assert shared.buckets == alone.buckets
    assert shared.iteration_seconds >= alone.iteration_seconds - 1e-9


@given(traces, lines, slowdowns)
def test_what_is_sent_after_computing_is_not_slowed(trace, line, slowdown):
    ways = [Way("w", (line,))]
    alone, shared = (predict(trace, PLANNERS["naive"], ways, 2, each) for each in (1.0, slowdown))
    assert shared.iteration_seconds == pytest.approx(alone.iteration_seconds)


@given(traces, lines)
def test_without_a_slowdown_nothing_is_touched(trace, line):
    timeline = predict(trace, PLANNERS["exact"], [Way("w", (line,))], 2).timeline
    assert squeezed(trace, 1.0) is trace
    assert stretched(timeline, 1.0) is timeline
