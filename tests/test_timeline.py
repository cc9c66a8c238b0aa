import pytest

from penstock.errors import PlanError
from penstock.timeline import COMMUNICATION, COMPUTATION, COMPUTE, Span, Timeline, in_turn

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


def test_each_lane_of_each_rank_is_a_row_and_lanes_stand_in_one_order_whoever_starts_first():
    spans = (
        Span("a: send to 1", COMMUNICATION, 1, 2, rank=0),
        Span("a: recv from 0", COMMUNICATION, 1, 2, rank=1),
        Span("a: encode", COMPUTATION, 4, 5, rank=0),
        Span("a", "of another kind", 0, 9, rank=0),
        Span("f", COMPUTE, 3, 4, rank=0),
        Span("b: encode", COMPUTATION, 2, 3, rank=0),
    )
    rows = Timeline(spans).rows
    assert list(rows) == [
        (0, COMPUTE), (0, COMPUTATION), (0, COMMUNICATION), (0, "of another kind"), (1, COMMUNICATION),
    ]  # fmt: skip
    assert [span.name for span in rows[0, COMPUTATION]] == ["b: encode", "a: encode"]


def test_messages_in_flight_together_are_drawn_one_after_the_other_on_their_rank():
    spans = [Span("b", COMMUNICATION, 1, 5), Span("a", COMMUNICATION, 0, 3), Span("c", COMMUNICATION, 2, 4, rank=1)]
    found = [(span.name, span.start_seconds, span.end_seconds) for span in in_turn(spans)]
    assert found == [("a", 0, 3), ("c", 2, 4), ("b", 3, 5)]
