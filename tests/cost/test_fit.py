import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cost.fit import fit_line, fit_measured
from penstock.errors import FitError

SIZES = [2**e for e in range(10, 27)]


@given(st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-7))
def test_exact_points_give_back_their_line(a, b):
    fit = fit_line([(size, a + b * size) for size in SIZES])
    assert fit.line.a_seconds == pytest.approx(a, rel=1e-6)
    assert fit.line.b_seconds_per_byte == pytest.approx(b, rel=1e-6)
    assert fit.worst_error < 1e-6
    assert fit.points == len(SIZES)


def test_small_messages_that_a_coarse_clock_cannot_tell_apart_do_not_hide_that_large_ones_take_longer():
    fit = fit_line([*((size, 1e-4) for size in SIZES[:6]), (1 << 26, 0.1)])
    assert fit.line.b_seconds_per_byte == pytest.approx(0.1 / (1 << 26), rel=0.01)


def test_noise_and_hiccups_hardly_move_the_line():
    random = np.random.default_rng(7)
    points = [(size, (1e-3 + 1e-9 * size) * random.normal(1, 0.02)) for size in SIZES for _ in range(5)]
    points += [(SIZES[3], 0.5), (SIZES[8], 0.9), (SIZES[-1], 2.0)]  # the machine did something else meanwhile
    fit = fit_line(points)
    assert fit.line.a_seconds == pytest.approx(1e-3, rel=0.05)
    assert fit.line.b_seconds_per_byte == pytest.approx(1e-9, rel=0.05)
    assert fit.median_error < 0.03
    assert fit.worst_error > 0.9  # and the hiccups are not hidden


def test_a_startup_too_small_to_be_seen_is_zero_not_negative():
    fit = fit_line([(1000, 0.9e-6), (2000, 2e-6), (4000, 4.1e-6)])
    assert fit.line.a_seconds == 0.0
    assert fit.line.b_seconds_per_byte == pytest.approx(1e-9, rel=0.1)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([(1, 1.0), (1, 2.0)], "times: 1 different sizes; wanted at least 2, measure more sizes"),
        ([], "times: 0 different sizes"),
        ([(1, 1.0), (2, -1.0)], "a size or time is negative, zero or not finite"),
        ([(1, 1.0), (2, float("nan"))], "not finite"),
        (
            [(1000, 3e-3), (4000000, 2e-3)],
            "times do not grow with size: 1000 bytes took 0.003 s and 4000000 bytes 0.002 s",
        ),
        ([(1000, 1e-3), (4000000, 1e-3)], "do not grow with size"),
    ],
)
def test_points_that_determine_no_line_are_refused(points, message):
    with pytest.raises(FitError) as caught:
        fit_line(points, "times")
    assert message in str(caught.value)


def hiccups(*spoiled):
    """Return a measurement of a line whose turns are spoiled at these sizes, turn by turn."""
    turns = iter(spoiled)
    return lambda: [
        (size, 1e-3 + 1e-9 * size + (1.0 if size in turn else 0.0)) for turn in [next(turns)] for size in SIZES
    ]


def test_what_gives_no_line_is_measured_again_and_the_least_of_each_size_counts():
    fit = fit_measured(hiccups(SIZES[:5], SIZES[5:6], SIZES[:1]), "times")  # the third turn is not needed
    assert fit.line.a_seconds == pytest.approx(1e-3, rel=1e-6)
    assert fit.line.b_seconds_per_byte == pytest.approx(1e-9, rel=1e-6)
    assert fit.least_seconds == pytest.approx(1e-3 + 1e-9 * SIZES[0])


def test_what_gives_a_line_is_measured_once():
    assert fit_measured(hiccups([]), "times").points == len(SIZES)


def test_after_four_measurements_without_a_line_the_last_word_is_what_was_found():
    turns = []
    with pytest.raises(FitError, match="times do not grow with size: 1000 bytes took 1 s and 2000 bytes 1 s"):
        fit_measured(lambda: turns.append(1) or [(1000, 1.0), (2000, 1.0)], "times")
    assert len(turns) == 4


def test_times_that_fall_get_the_steepest_line_that_their_noise_would_hide():
    """Seen on a busy machine: onebit over loopback, 2 MiB in 1.24 ms and 8 MiB in 0.95 ms, four times over."""
    fit = fit_measured(lambda: [(2 << 20, 1.24e-3), (8 << 20, 0.95e-3)], "times")
    assert fit.line.a_seconds == pytest.approx(0.95e-3)
    assert fit.line.b_seconds_per_byte == pytest.approx(0.29e-3 / (8 << 20))
    assert fit.worst_error == pytest.approx(0.29 / 0.95)
