import pytest

from penstock.bench.link_rates import link_rows, message_rows
from penstock.cluster.check import Measured
from penstock.errors import ClusterError


def test_each_rate_gives_a_row_alone_and_one_together():
    try:
        rows = list(link_rows(rates=("100mbit",), hosts=2, seconds=0.05))
    except ClusterError as error:
        pytest.skip(str(error))
    assert [(row["rate"], row["pairs"], row["transfers"]) for row in rows] == [
        ("100mbit", "alone", 2),
        ("100mbit", "together", 2),
    ]
    for row in rows:
        assert row["asked_bits_per_second"] == 10**8
        assert row["least_deviation"] <= row["largest_deviation"]
        assert row["median_bits_per_second"] > 0  # how near to the rate is tested beside the check itself


def test_a_megabyte_takes_about_its_time_even_after_a_pause():
    seconds = []
    while not seconds or (min(seconds) > 3 * 0.04 and len(seconds) < 10):
        try:
            (row,) = message_rows(rates=("200mbit",), sizes=(1_000_000,))
        except ClusterError as error:
            pytest.skip(str(error))
        assert row["asked_seconds"] == pytest.approx(0.04)
        seconds.append(row["seconds"])
    assert 0.9 * 0.04 < min(seconds) < 3 * 0.04  # slower on a busy machine, never faster


def test_deviation_is_delivered_over_asked():
    assert Measured("alone", 0, 1, 2e8, 1.9e8, 1e-5).deviation == pytest.approx(-0.05)
    assert Measured("alone", 0, 1, None, 1.9e8, 1e-5).deviation is None
