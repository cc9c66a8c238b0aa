"""Figures that pages written by hand quote are those of the records."""

from pathlib import Path

import pytest

from page import pages_with_quotes, quotable, quoted, update_pages
from page_pictures import draw_time_to_loss
from page_quotes import QUOTES, against, gpu_table, time_to_loss
from penstock.errors import PenstockError

ROOT = Path(__file__).parents[2]
RECORDS = quotable(ROOT / "benchmarks" / "results")
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
    with pytest.raises(PenstockError, match=r"page.md: quote 'trian'; wanted one of check, gpu, time-to-loss, train, "):
        quoted(PLACE.format("trian"), {}, "page.md")
    with pytest.raises(PenstockError, match=r"quote 'gains-text': nothing about 'rows' in gains.json; measure it too"):
        quoted(PLACE.format("gains-text"), {"gains.json": {}}, "page.md")


def test_ratios_in_words():
    assert [against(ratio) for ratio in (0.9, 0.996, 1.004, 1.2)] == ["10% less time", "as long", "as long", "20% more"]


def ranks(date: str, rate: str, **times: float) -> dict[str, object]:
    rows = [
        {"model": "toy", "method": name, "rate": rate, "hosts": 4, "ms_per_iteration": [ms]}
        for name, ms in times.items()
    ]
    return {"date": date, "rows": rows}


def test_the_gpu_table_has_a_column_for_each_rate_the_latest_record_and_losing_rows_in_bold():
    old = ranks("2026-01-01", "10gbit", none=1.0, stock=10.0, onebit=9.0)
    new = ranks("2026-01-02", "10gbit", onebit=5.0) | {}
    slow = ranks("2026-01-03", "1gbit", stock=100.0, onebit=120.0)
    assert gpu_table([new, slow, old]).splitlines() == [
        "| method | toy, 1 Gb/s | toy, 10 Gb/s |",
        "| --- | ---: | ---: |",
        "| no communication at all | - | 1 |",
        "| stock DDP | 100 | 10 |",
        '| penstock, `codec="onebit"` | **120 (0.83x)** | 5 (2.00x) |',
    ]


def test_time_to_loss_is_told_for_each_record_the_fastest_first_with_what_never_came_there(tmp_path):
    def row(method: str, seconds: float | None) -> dict[str, object]:
        told = {"seconds_to_within_1_percent": seconds, "times_stock": seconds and round(100 / seconds, 2)}
        return {"method": method, "final": 1.5, "curve": [[0, 0.0, 3.0], [10, seconds or 200.0, 1.5]]} | told

    rows = [row("stock DDP", 100.0), row("onebit", None), row("blocks(bits=4)", 40.0)]
    record = {"machine": "H200", "task": "gpt", "hosts": 4, "rate": "1gbit", "steps": 300, "rows": rows}
    told = time_to_loss([record, record | {"rate": "10gbit"}])
    order = [
        told.index(line) for line in ("| blocks(bits=4) | 40 s | 2.50x |", "| stock DDP | 100 s", "| onebit | never")
    ]
    assert order == sorted(order)
    assert "4 hosts at 1 Gb/s (H200)" in told
    assert "4 hosts at 10 Gb/s (H200)" in told
    assert draw_time_to_loss([record], tmp_path).stat().st_size > 5000
