"""Timelines as text."""

import doctest

from penstock.planning import explain as text_picture
from penstock.planning.explain import text_picture as drawn
from penstock.timeline import Span, Timeline


def test_the_example_in_its_docstring_holds():
    assert doctest.testmod(text_picture).failed == 0


def test_two_timelines_share_one_axis():
    short, long = (Timeline((Span("a", "network", 0.0, end),)) for end in (0.5, 2.0))
    assert drawn({"predicted": short, "measured": long}, 8) == [
        "predicted network |##      | 500 ms",
        "measured network  |########| 2000 ms",
    ]


def test_a_span_that_is_too_short_to_see_is_one_character():
    timeline = Timeline((Span("a", "compute", 0.0, 1.0), Span("b", "network", 0.5, 0.5000001)))
    assert drawn({"x": timeline}, 10)[1] == "x network |     #    | 500 ms"


def test_nothing_is_drawn_of_nothing():
    assert drawn({}) == []
