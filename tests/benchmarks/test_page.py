import os
import re
from pathlib import Path

import pytest

from page import MOST_ROWS, claims_text, command_now, load_records, make_page, quotable, quoted, write_page
from page_pictures import PICTURES
from penstock.bench.record import make_record, save_record
from penstock.errors import FormatError, PenstockError

ROOT = Path(__file__).parents[2]
PAGE, RESULTS = ROOT / "docs" / "benchmarks.md", ROOT / "benchmarks" / "results"

TRAIN = {"hosts": 4, "rate": "1gbit", "model": "toy", "batch": 8, "iteration_seconds": 1.0, "spread": 0.1,
         "exposed_seconds": 0.5, "bytes_sent": 10.0}  # fmt: skip
REPLAY = {"hosts": 4, "rate": "1gbit", "what": "toy", "messages": 1, "measured_seconds": 1.0, "spread": 0.1,
          "simulated_seconds": 0.9, "error": -0.1}  # fmt: skip
COLLECTIVE = {"hosts": 4, "rate": "1gbit", "engine": "gloo", "operation": "reduce", "nbytes": 1000, "seconds": 1.0}
ROWS = {
    "train": [TRAIN | {"method": "ddp"}, TRAIN | {"method": "penstock-exact"}, {"method": "x", "error": "died"}],
    "replay": [REPLAY | {"how": "wfbp"}, REPLAY | {"how": "exact", "measured_seconds": 1.5}],
    "collectives": [COLLECTIVE | {"strategy": each, "implementation": each} for each in ("native", "ring")],
    "scaling": [REPLAY | {"how": "exact", "hosts": hosts} for hosts in (2, 4)],
    "rates": [REPLAY | {"how": "exact", "rate": rate} for rate in ("1gbit", "none")],
    "something_new": [{"name": "a", "seconds": 1.0}],
}
HELD = {"text": "ring, speed", "value": 1.02, "wanted": 1.0, "at_most": False, "holds": True}
MISSED = {"text": "pipeline, time on 8 hosts over 2", "value": 1.5, "wanted": 1.2, "at_most": True, "holds": False}


@pytest.fixture
def folder(tmp_path):
    for benchmark, rows in ROWS.items():
        save_record(make_record(benchmark, rows), tmp_path / "results" / f"{benchmark}.json")
    return tmp_path


def test_the_page_in_the_tree_is_what_the_records_in_the_tree_give():
    pictures = {path.stem.removeprefix("bench-"): f"pictures/{path.name}" for path in drawn()}
    made = make_page(load_records(RESULTS), os.path.relpath(RESULTS, PAGE.parent), pictures)
    assert quoted(made, quotable(RESULTS), "the page") == PAGE.read_text(), (
        "docs/benchmarks.md is not what `python benchmarks/page.py` makes; run it"
    )


def test_the_whole_tables_in_the_tree_are_what_the_records_in_the_tree_give():
    pictures = {path.stem.removeprefix("bench-"): f"../../docs/pictures/{path.name}" for path in drawn()}
    assert make_page(load_records(RESULTS), ".", pictures, most_rows=0) == (RESULTS / "README.md").read_text(), (
        "benchmarks/results/README.md is not what `python benchmarks/page.py` makes; run it"
    )


def test_a_person_can_read_the_page():
    assert len(re.sub(r"[|]|---:?", " ", PAGE.read_text()).split()) < 3000


def test_of_a_long_table_the_rows_that_lose_most_come_first_and_losses_are_counted():
    sizes = range(1, 31)
    slow = [
        COLLECTIVE | {"strategy": "ring", "implementation": "penstock", "nbytes": n, "seconds": n / 10} for n in sizes
    ]
    even = [COLLECTIVE | {"strategy": "native", "implementation": "gloo", "nbytes": n} for n in sizes]
    record = make_record("collectives", slow + even)
    text = make_page({"c.json": record}, "results", {})
    assert "a rival is faster in 20 of 30." in text
    assert text.index("3.00x") < text.index("2.90x") < text.index("0.10x")
    assert text.count("x |\n") == MOST_ROWS


def drawn() -> list[Path]:
    """Return the pictures that belong on the page of the tree."""
    benchmarks = {record["benchmark"] for record in load_records(RESULTS).values()}
    return [PAGE.parent / "pictures" / f"bench-{name}.png" for name in PICTURES if name in benchmarks]


def test_every_picture_of_the_page_is_in_the_tree():
    assert all(path.exists() for path in drawn())


def test_every_benchmark_is_on_the_page_with_its_picture_and_its_source(folder):
    out = folder / "docs" / "page.md"
    pictures = write_page(load_records(folder / "results"), folder / "results", out)
    text = out.read_text()
    assert re.findall(r"^## (.*)", text, flags=re.MULTILINE) == [
        "GPU ranks", "Time to loss", "Training", "Planners on a real network", "More hosts", "Slower and faster links",
        "Collectives", "Something new",
    ]  # fmt: skip
    assert sorted(path.name for path in pictures) == sorted(f"bench-{name}.png" for name in PICTURES)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert target.startswith(("https://", "#")) or (out.parent / target.split("#")[0]).exists()


def test_losing_and_failing_rows_are_marked(folder):
    text = make_page(load_records(folder / "results"), "results", {})
    assert "**slower than wfbp: 1.500x**" in text
    assert "failed: died" in text
    assert "slower than ddp" not in text


def test_a_record_names_machine_versions_commit_command_and_date(folder):
    records = load_records(folder / "results")
    text = make_page(records, "results", {}, most_rows=0)
    record = records["train.json"]
    for value in (record["date"], record["commit"], record["command"], record["machine"]["cpu"],
                  f"torch {record['versions']['torch']}"):  # fmt: skip
        assert value in text


def test_start_up_times_stand_below_the_table_of_their_record_with_their_own_source(tmp_path):
    method = {"method": "penstock-auto", "ready_seconds": 13.5}
    rows = [method | {"start": "cold", "held_seconds": 7.25}, method | {"start": "warm", "held_seconds": 1.5}]
    startup = {"date": "some day", "command": "penstock bench train --startup-only", "commit": "abc", "rows": rows}
    save_record(make_record("train", ROWS["train"], startup=startup), tmp_path / "train.json")
    text = make_page(load_records(tmp_path), "results", {}, most_rows=0)
    assert "| cold | 7.25 s |" in text
    assert "| warm | 1.5 s |" in text
    assert "`penstock bench train --startup-only`, some day, commit abc." in text


def test_records_that_are_none_are_refused(tmp_path):
    with pytest.raises(
        PenstockError, match=r"no benchmark records in .*; wanted .json files written by `penstock bench"
    ):
        load_records(tmp_path)
    (tmp_path / "x.json").write_text('{"format": "other"}')
    with pytest.raises(FormatError, match=r"x.json: format: found 'other'; wanted penstock-bench/1"):
        load_records(tmp_path)
    (tmp_path / "x.json").write_text('{"format": "penstock-bench/1"}')
    with pytest.raises(FormatError, match=r"x.json: benchmark: found 'nothing'"):
        load_records(tmp_path)


def test_a_record_says_what_was_missed_and_by_how_much():
    text = claims_text({"claims": [HELD, MISSED], "note": "The machine was busy."})
    assert text == (
        "Targets met: 1 of 2. Missed:\n\n"
        "- **pipeline, time on 8 hosts over 2: 1.5**, wanted at most 1.2: missed by 25%\n\n"
        "The machine was busy.\n\n"
    )


def test_a_record_that_holds_everything_says_only_that():
    assert claims_text({"claims": [HELD]}) == "Targets met: 1 of 1.\n\n"


def test_a_record_without_claims_says_nothing():
    assert claims_text({"rows": []}) == claims_text({"claims": [], "note": ""}) == ""


def test_claims_about_collectives_are_made_for_the_page_where_a_record_has_none():
    times = {"native": 1.0, "ring": 0.5}
    rows = [
        COLLECTIVE | {"operation": "all_reduce", "nbytes": 16_000_000, "strategy": name, "seconds": seconds}
        | {"predicted_seconds": None}
        for name, seconds in times.items()
    ]  # fmt: skip
    assert claims_text({"benchmark": "collectives", "rows": rows}) == "Targets met: 1 of 1.\n\n"
    assert claims_text({"benchmark": "replay", "rows": rows}) == ""


def test_commands_of_old_records_are_shown_as_they_are_written_now():
    assert command_now("penstock bench sparse --hosts 4") == "python benchmarks/sparse.py --hosts 4"
    assert command_now("penstock bench profile --out F") == "python benchmarks/profile_overhead.py --out F"
    assert command_now("penstock bench train --hosts 2") == "penstock bench train --hosts 2"
    assert command_now("penstock bench scaling --iterations 2").startswith("penstock bench replay --name scaling ")


def test_records_of_training_on_cpus_stand_behind_the_others_with_what_was_asked_of_them(folder):
    rows = [{"model": "toy", "method": name, "iteration_seconds": each} for name, each in (("ddp", 1.0), (NATIVE, 2.0))]
    save_record(make_record("train", rows), folder / "results" / "cpu" / "a.json")
    records = load_records(folder / "results")
    assert list(records)[:2] == ["train.json", "cpu/a.json"]
    text = make_page(records, "results", {}, most_rows=0)
    assert f"- **toy, {NATIVE} over ddp, times as fast: 0.5**, wanted at least 1: missed by 50%" in text
    assert "[cpu/a.json](results/cpu/a.json)" in text
    assert "Targets met: 0 of 1. [2 records, all rows]" in make_page(records, "results", {})


NATIVE = "penstock-exact-native"
