"""Figures that pages written by hand quote are those of the records."""

from pathlib import Path

import pytest

from page import load_records, pages_with_quotes, quoted, update_pages
from page_quotes import QUOTES, against
from penstock.errors import PenstockError

ROOT = Path(__file__).parents[2]
RECORDS = load_records(ROOT / "benchmarks" / "results")
PAGES = pages_with_quotes(ROOT / "docs")
PLACE = "before\n<!-- quote {} -->\n\nold\n\n<!-- end -->\nafter\n"
COORDINATOR = {
    "coordinator.json": {
        "rows": [
            {"hosts": hosts, "how": how, "measured_seconds": hosts * seconds}
            for hosts in (8, 4)
            for how, seconds in (("at will", 0.01), ("online", 0.03), ("steady", 0.002))
        ]
    }
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_of_the_tree_quotes_the_records_of_the_tree(page):
    text = page.read_text()
    assert quoted(text, RECORDS, page.name) == text, f"{page.name} quotes old figures; run `python benchmarks/page.py`"


def test_every_quote_has_a_page_that_shows_it():
    shown = "".join(page.read_text() for page in PAGES)
    assert [name for name in QUOTES if f"<!-- quote {name} -->" not in shown] == []
    assert PAGES[0] == ROOT / "README.md"


def test_a_quote_is_made_from_its_record_and_nothing_around_it_changes(tmp_path):
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(PLACE.format("coordinator"))
    assert update_pages(pages_with_quotes(page.parent), COORDINATOR) == [page]
    table = "| ms | 4 hosts | 8 hosts |\n| --- | ---: | ---: |\n| at will | 40 | 80 |\n| steady | 8 | 16 |\n"
    assert page.read_text() == PLACE.format("coordinator").replace("old", f"{table}| online | 120 | 240 |")
    assert update_pages([page], COORDINATOR) == []


def test_a_quote_without_its_record_stays_and_an_unknown_one_is_refused():
    assert quoted(PLACE.format("train"), {}, "page.md") == PLACE.format("train")
    with pytest.raises(PenstockError, match=r"page.md: quote 'trian'; wanted one of train, "):
        quoted(PLACE.format("trian"), {}, "page.md")
    with pytest.raises(PenstockError, match=r"quote 'gains-text': nothing about 'rows' in gains.json; measure it too"):
        quoted(PLACE.format("gains-text"), {"gains.json": {}}, "page.md")


def test_ratios_in_words():
    assert [against(ratio) for ratio in (0.9, 0.996, 1.004, 1.2)] == ["10% less time", "as long", "as long", "20% more"]
