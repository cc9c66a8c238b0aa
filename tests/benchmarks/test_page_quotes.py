"""Figures that pages written by hand quote are those of the records."""

from pathlib import Path

import pytest

from page import pages_with_quotes, quotable, quoted, update_pages
from page_pictures import draw_time_to_loss
from page_quotes import (
    QUOTES,
    STEPS,
    against,
    casync_table,
    casync_text,
    gpu_table,
    one_worker_table,
    python_text,
    sharded_text,
    simulated_table,
    time_to_loss,
    time_to_loss_text,
)
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


def test_what_the_codec_does_for_sharded_training_stands_beside_what_ours_does_without():
    times = {"torch's HSDP": 20.0, "ours, uncompressed": 10.0, "ours, blocks(bits=4)": 8.0}
    times |= {"no traffic between hosts": 10.0}
    record = {"date": "2026-11-20T01:02:03+00:00"}
    for floors, told in (({}, "0.80 times torch's FSDP"), ({"ours, no traffic between hosts": 4.0}, "2.00 times ours")):
        rows = [{"method": name, "median_ms": ms} for name, ms in (times | floors).items()]
        text = sharded_text({**record, "rows": rows})
        assert text.startswith("On 2026-11-20, 2.50x torch's HSDP: ours uncompressed is 2.00x, the codec 1.25x that.")
        assert f"{told} without traffic between hosts" in text


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


def test_an_empty_place_is_filled_and_what_follows_it_stays():
    empty = "<!-- quote coordinator -->\n\n<!-- end -->\n\n## Next\n\n"
    text = quoted(empty + PLACE.format("coordinator"), COORDINATOR, "page.md")
    assert text.count("| online | 120 | 240 |") == 2
    assert "<!-- end -->\n\n## Next\n\nbefore\n" in text


def test_a_quote_without_its_record_stays_and_an_unknown_one_is_refused():
    assert quoted(PLACE.format("train"), {}, "page.md") == PLACE.format("train")
    with pytest.raises(
        PenstockError, match=r"page.md: quote 'trian'; wanted one of check, gpu, one-worker, time-to-loss, "
    ):
        quoted(PLACE.format("trian"), {}, "page.md")
    with pytest.raises(PenstockError, match=r"quote 'gains-text': nothing about 'rows' in gains.json; measure it too"):
        quoted(PLACE.format("gains-text"), {"gains.json": {}}, "page.md")


def replayed(slower: float, hosts: int, *seconds: float, spread: float = 0.01) -> dict[str, object]:
    rows = [
        {"hosts": hosts, "rate": "1gbit", "slower": slower, "what": "vgg16", "how": how, "measured_seconds": each,
         "spread": spread, "simulated_seconds": each, "error": 0.0, "compressed_share": float(how != "stock")}
        for how, each in zip(STEPS, seconds, strict=True)
    ]  # fmt: skip
    return {
        "benchmark": "casync", "rows": rows, "machine": {"cores": 2}, "command": "python casync.py --iterations 7",
    }  # fmt: skip


def test_the_steps_say_how_fast_a_hosts_core_is_and_which_of_them_gain():
    quick, fair = replayed(8, 4, 6.0, 0.5, 0.495, 0.4, 0.4), replayed(2, 4, 6.0, 0.5, 0.6, 0.4, 0.3)
    assert casync_table(quick, fair).splitlines() == [
        "|  | a host's core | iterations | stock DDP | + codec | + pipelining | + bulk | + selective |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| VGG-16, 4 hosts, 1 Gb/s | 1x | 7 | 6,000 | 500 | **600** | 400 | 300 |",
        "| VGG-16, 4 hosts, 1 Gb/s | 4x | 7 | 6,000 | 500 | (495) | 400 | (400) |",
    ]
    assert casync_text(quick, fair) == (
        "Steps that gain for certain: 3 of 4 at 1 Gb/s with a core 1 times as fast (1 slower); "
        "2 of 4 at 1 Gb/s with a core 4 times as fast (1 uncertain, 1 the same plan)."
    )
    assert simulated_table(quick, fair).splitlines()[2:] == [
        "| steps, 1 Gb/s | 4x | 3 | 3 | 0 |", "| steps, 1 Gb/s | 1x | 4 | 4 | 0 |",
    ]  # fmt: skip


def test_pythons_share_says_which_planned_rows_are_above_what_was_asked():
    row = {"model": "toy", "planner": "exact", "share": 0.0312, "messages": 3, "calls_per_second": 1234.5}
    claim = {"text": "toy by exact: the walk, of all cores", "holds": False}
    told = "Of all cores at most: toy by `exact` 3.1% (3 messages, 1,234 calls a second). So {}."
    assert python_text({"rows": [row], "claims": [claim]}) == told.format("above the 3% asked: toy by exact")
    below = python_text({"rows": [row], "claims": [claim | {"holds": True}]})
    assert below == told.format("all planned rows are below the 3% asked")


def test_records_that_may_be_absent_are_quoted_once_they_are_there():
    absent = "casync-vgg-4-hosts-one-core.json"
    text, here = PLACE.format("casync"), {name: record for name, record in RECORDS.items() if name != absent}
    row = "| VGG-16, 4 hosts, 1 Gb/s | 1x | 7 | 6,000 | 500 | 450 | 400 | 300 |"
    without, found = quoted(text, here, "page.md"), replayed(2, 4, 6.0, 0.5, 0.45, 0.4, 0.3)
    assert "| 0.5x |" in without
    assert row not in without
    assert row in quoted(text, {**here, absent: found}, "page.md").splitlines()


def test_ratios_in_words():
    assert [against(ratio) for ratio in (0.9, 0.996, 1.004, 1.2)] == ["10% less time", "as long", "as long", "20% more"]


def ranks(name: str, date: str, rate: str, hosts: int = 4, **times: float) -> dict[str, object]:
    rows = [
        {"model": "toy", "method": method, "rate": rate, "hosts": hosts, "ms_per_iteration": [ms]}
        for method, ms in times.items()
    ]
    return {"file": name, "commit": "abc", "date": date, "rows": rows}


def test_each_column_of_the_gpu_table_is_one_record_which_is_named():
    """No figure of the newer record, whose stock was another, stands beside those of the old; losing rows are bold."""
    old = ranks("old.json", "2026-01-01", "10gbit", none=1.0, stock=10.0, onebit=9.0)
    new = ranks("new.json", "2026-01-02", "10gbit", stock=20.0, onebit=5.0)
    slow = ranks("slow.json", "2026-01-03", "1gbit", stock=100.0, onebit=120.0)
    alone = ranks("alone.json", "2026-01-04", "none", 1, none=1.0, stock=2.0)
    folder = "https://github.com/penstock/penstock/blob/main/benchmarks/results/gpu"
    assert gpu_table([new, slow, alone, old]).splitlines() == [
        "| method | toy, 1 Gb/s | toy, 10 Gb/s |",
        "| --- | ---: | ---: |",
        "| no communication at all | - | 1 |",
        "| stock DDP | 100 | 10 |",
        '| penstock, `codec="onebit"` | **120 (0.83x)** | 9 (1.11x) |',
        "",
        f"- toy, 1 Gb/s: [slow.json]({folder}/slow.json), 2026-01-03, commit abc",
        f"- toy, 10 Gb/s: [old.json]({folder}/old.json), 2026-01-01, commit abc",
        "",
        "Measured again later, with fewer methods:",
        "",
        "| method | toy, 10 Gb/s |",
        "| --- | ---: |",
        "| stock DDP | 20 |",
        '| penstock, `codec="onebit"` | 5 (4.00x) |',
        "",
        f"- toy, 10 Gb/s: [new.json]({folder}/new.json), 2026-01-02, commit abc",
    ]
    assert one_worker_table([old, alone]).splitlines()[0] == "| method | toy |"
    later = ranks("later.json", "2026-01-05", "10gbit", none=2.0, stock=10.0, onebit=8.0)
    assert "later.json" in gpu_table([old, later])
    assert "old.json" not in gpu_table([old, later])
    assert "again" not in gpu_table([old, later])


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
    with pytest.raises(KeyError):  # the sentence is about `auto`
        time_to_loss_text([record])
    assert draw_time_to_loss([record], tmp_path).stat().st_size > 5000


def test_the_sentence_about_time_to_loss_names_who_is_faster_than_auto():
    def record(rate: str, **times: float | None) -> dict[str, object]:
        names = {
            "auto": "ours: auto",
            "fp16": "fp16 hook",
            "power": "PowerSGD rank 4",
            "blocks": "ours: blocks(bits=4)",
        }
        return {"rate": rate, "rows": [{"method": names[name], "times_stock": each} for name, each in times.items()]}

    told = time_to_loss_text(
        [
            record("10gbit", auto=1.14, fp16=1.61, power=None),
            record("1gbit", auto=2.85, fp16=1.9, blocks=2.9),
            record("10gbit", auto=1.36, fp16=1.7),
        ]
    )
    assert (
        "at 1 Gb/s 2.85 times as fast; at 10 Gb/s 1.14 to 1.36 times as fast, **fp16 hook 1.61 to 1.70 times**" in told
    )
