"""The usual order, medians and spread, by hand and against numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="penstock.torch needs torch")

from penstock.planning.profile_summary import Pass, merged_order, moved_tensors, spread, summarise

seconds = st.floats(1e-6, 10, allow_nan=False)


def passes_of(intervals, forward=1.0, names="abcdefgh"):
    """Return a pass whose gradients follow one another after `intervals`."""
    return Pass(forward, tuple(zip(names, forward + np.cumsum(intervals), strict=False)))


def test_three_iterations_by_hand():
    times = summarise([passes_of([1, 2], 4), passes_of([1, 4], 5), passes_of([1, 3], 6)])
    assert times.forward_seconds == 5
    assert times.intervals == {"a": (1, 0), "b": (3, 1)}  # the quartiles of 2, 3, 4 are 2.5 and 3.5
    assert (times.forward_spread_seconds, times.backward_spread_seconds) == (1, 1)
    assert times.moved == times.occasional == ()


def test_an_interrupt_in_one_iteration_touches_nothing():
    calm = [passes_of([1, 2, 3])] * 4
    assert summarise([*calm, passes_of([1, 50, 3])]).intervals == summarise(calm).intervals


def test_two_different_interrupts_do_not_make_the_pass_look_shorter_than_its_median():
    times = summarise([passes_of([2, 1, 1]), passes_of([1, 2, 1]), passes_of([1, 1, 2])])
    assert [interval for interval, _ in times.intervals.values()] == pytest.approx([4 / 3] * 3)


@given(st.lists(st.lists(seconds, min_size=3, max_size=3), min_size=1, max_size=7))
def test_intervals_add_up_to_the_median_backward_pass(rows):
    times = summarise([passes_of(row, 0.0) for row in rows])
    total = sum(interval for interval, _ in times.intervals.values())
    assert total == pytest.approx(np.median(np.sum(rows, axis=1)))


@given(st.lists(seconds, min_size=1))
def test_spread_is_numpys_interquartile_range(values):
    assert spread(values) == pytest.approx(np.subtract(*np.percentile(values, [75, 25])), abs=1e-9)


def test_the_most_frequent_order_is_kept_and_gives_the_times():
    usual = [Pass(0, (("a", 1.0), ("b", 2.0), ("c", 3.0)))] * 2
    other = Pass(0, (("b", 50.0), ("c", 60.0), ("a", 70.0)))
    times = summarise([other, *usual])
    assert list(times.intervals.items()) == [("a", (1, 0)), ("b", (1, 0)), ("c", (1, 0))]
    assert times.moved == ("a",)


def test_a_tensor_that_is_rarely_used_stands_where_it_stood_then():
    usual = [Pass(0, (("a", 1.0), ("c", 2.0)))] * 3
    times = summarise([*usual, Pass(0, (("a", 1.0), ("b", 1.5), ("c", 2.0)))])
    assert list(times.intervals) == ["a", "b", "c"]
    assert times.occasional == ("b",)
    assert times.moved == ()


def test_marks_of_two_streams_never_make_a_negative_interval():
    assert Pass(2.0, (("a", 3.0), ("b", 2.5), ("c", 4.0))).intervals() == {"a": 1.0, "b": 0.0, "c": 1.0}
    assert Pass(2.0, (("a", 4.0), ("b", 3.0))).backward_seconds == 2.0


@given(st.permutations("abcdef"), st.sampled_from("abcdef"), st.integers(0, 5))
def test_moving_one_tensor_names_that_one_or_a_neighbour_it_passed(order, name, place):
    changed = [each for each in order if each != name]
    changed.insert(place, name)
    moved = moved_tensors(order, [changed])
    distance = abs(order.index(name) - place)
    if distance == 0:
        assert moved == ()
    elif distance == 1:
        assert len(moved) == 1  # which of the two moved is a matter of taste
    else:
        assert moved == (name,)


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), unique=True), min_size=1))
def test_a_merged_order_holds_every_tensor_once_and_keeps_the_usual_order(orders):
    merged = merged_order(orders[0], orders)
    assert sorted(merged) == sorted(set().union(*orders))
    assert [name for name in merged if name in orders[0]] == orders[0]
