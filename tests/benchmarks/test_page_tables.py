import pytest

from page_tables import Rivalry, cell, markdown_table

RIVALRY = Rivalry(group=("size",), name="who", ours=lambda name: name == "us", peer=lambda name: name != "us")


def lines(rows, rivalry=RIVALRY, **options):
    return markdown_table(rows, rivalry, **options).splitlines()


def test_a_row_that_a_peer_beats_says_so():
    rows = [
        {"who": "us", "size": 1, "seconds": 2.0},
        {"who": "them", "size": 1, "seconds": 1.0},
        {"who": "others", "size": 1, "seconds": 1.6},
        {"who": "us", "size": 2, "seconds": 2.0},
        {"who": "them", "size": 2, "seconds": 3.0},
    ]
    table = lines(rows)
    assert table[0] == "| who | size | seconds | note |"
    assert table[2].endswith("| **slower than them: 2.000x** |")
    assert [line.endswith("|  |") for line in table[3:]] == [True] * 4


def test_there_is_no_note_column_without_notes():
    assert lines([{"who": "us", "size": 1, "seconds": 2.0}])[0] == "| who | size | seconds |"


def test_a_failed_row_keeps_its_error():
    rows = [{"who": "us", "size": 1, "seconds": 2.0}, {"who": "them", "size": 1, "error": "died\n of | <x>"}]
    assert lines(rows)[0] == "In every row: size 1."
    assert lines(rows)[-1] == "| them |  | failed: died of \\| &lt;x> |"


def test_a_simulation_that_is_off_by_more_than_a_tenth_is_marked():
    rows = [{"who": "a", "error": 0.101}, {"who": "b", "error": -0.099}]
    assert lines(rows)[-2] == "| a | +10.1% | **simulation off by more than 10%** |"
    assert lines(rows)[-1] == "| b | -9.9% |  |"


def test_fields_that_all_rows_share_stand_before_the_table():
    rows = [{"hosts": 4, "seconds": 1.0, "gone": 1}, {"hosts": 4, "seconds": 2.0, "gone": 2}]
    table = lines(rows, None, hidden=("gone",))
    assert table == ["In every row: hosts 4.", "", "| seconds |", "| ---: |", "| 1 s |", "| 2 s |"]


def test_a_share_is_shown_in_percent_whatever_its_name_says():
    rows = [{"spread": 0.05}, {"spread": 0.07}]
    assert lines(rows, None, shares=("spread",))[2:] == ["| +5.0% |", "| +7.0% |"]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("iteration_seconds", 1.23456, "1.235 s"),
        ("exposed_seconds", -0.0123, "-12.3 ms"),
        ("spread", 4.2e-5, "42 us"),
        ("nbytes", 16_000_000, "16 MB"),
        ("bytes_sent", 1234, "1.234 KB"),
        ("error", -0.031, "-3.1%"),
        ("overhead_spread", 0.02, "+2.0%"),
        ("median_bits_per_second", 1e9, "1000.0 Mb/s"),
        ("tensors", 100_000, "100,000"),
        ("ratio", 1.23456, "1.235"),
        ("anything", None, ""),
        ("anything", True, "True"),
        ("anything", "a|b", "a\\|b"),
    ],
)
def test_the_name_of_a_field_tells_its_unit(name, value, text):
    assert cell(name, value) == text
