import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.rates import format_rate, parse_delay, parse_rate, parse_rates
from penstock.errors import ClusterError


@pytest.mark.parametrize(
    ("text", "bits_per_second"),
    [("1gbit", 10**9), ("100mbit", 10**8), ("2.5Gbit", 2_500_000_000), ("512 kbit", 512_000), ("none", None)],
)
def test_rates_are_read_as_tc_writes_them(text, bits_per_second):
    assert parse_rate(text) == bits_per_second


@given(st.integers(min_value=10**5, max_value=10**11))
def test_a_formatted_rate_reads_back_to_six_digits(bits_per_second):
    assert parse_rate(format_rate(bits_per_second)) == pytest.approx(bits_per_second, rel=1e-5)


@pytest.mark.parametrize("text", ["", "fast", "1", "1gb", "-1gbit", "1gbit/s", "nan", "1e3mbit"])
def test_a_rate_without_a_known_unit_is_refused(text):
    with pytest.raises(ClusterError, match="wanted a number and one of bit, kbit, mbit, gbit"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["0gbit", "10bit", "500gbit"])
def test_a_rate_out_of_range_is_refused(text):
    with pytest.raises(ClusterError, match="wanted 100kbit to 100gbit, or none"):
        parse_rate(text)


def test_one_rate_holds_for_every_host():
    assert parse_rates("1gbit", 3) == (10**9,) * 3


def test_each_host_may_have_its_own_rate():
    assert parse_rates("1gbit,none,100mbit", 3) == (10**9, None, 10**8)


def test_a_list_of_the_wrong_length_is_refused():
    with pytest.raises(ClusterError, match="names 2 hosts of 3; give one rate, or one per host"):
        parse_rates("1gbit,1gbit", 3)


@pytest.mark.parametrize(("text", "seconds"), [("5ms", 5e-3), ("200us", 2e-4), ("1.5s", 1.5), ("0ms", 0.0)])
def test_delays_are_read_in_seconds(text, seconds):
    assert parse_delay(text) == pytest.approx(seconds)


def test_a_delay_without_a_unit_is_refused():
    with pytest.raises(ClusterError, match="latency '5': wanted a number and one of us, ms, s, as in 5ms"):
        parse_delay("5")
