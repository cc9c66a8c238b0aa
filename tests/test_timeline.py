import pytest

from penstock.errors import PlanError
from penstock.timeline import Span, Timeline

TIMELINE = Timeline((Span("b", "network", 2.0, 5.0), Span("f", "compute", 0.0, 3.0), Span("a", "network", 1.0, 2.0)))


def test_what_computation_does_not_hide_is_not_overlapped():
    assert (TIMELINE.iteration_seconds, TIMELINE.compute_seconds, TIMELINE.non_overlapped_seconds) == (5.0, 3.0, 2.0)


def test_a_lane_is_read_in_time_order():
    assert [span.name for span in TIMELINE.lane("network")] == ["a", "b"]


def test_an_empty_timeline_takes_no_time():
    assert Timeline(()).iteration_seconds == 0.0


@pytest.mark.parametrize(("start", "end"), [(2.0, 1.0), (-1.0, 1.0), (0.0, float("inf")), (float("nan"), 1.0)])
def test_a_span_that_runs_backwards_is_refused(start, end):
    with pytest.raises(PlanError, match="wanted 0 <= start <= end, finite"):
        Span("x", "network", start, end)
