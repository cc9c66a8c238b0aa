"""The campaign of kills: messages are judged strictly, cases follow from seeds, and a record is gone on from."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")
from soak import kills

SILENT = "did not answer: it died, hangs, or has ended"


@pytest.mark.parametrize(
    ("message", "judged"),
    [
        (f"ring: rank 0, step 5: no message exchanged with rank 2: reset; rank 1 {SILENT}", "named"),
        (f"ring: rank 0, step 5: no message exchanged with rank 1: reset; rank 2 {SILENT}", "blamed another"),
        (f"ring: rank 0: no message exchanged with rank 1: reset; rank 1 and rank 2 {SILENT}", "among others"),
        ("ring: rank 0: no message exchanged with rank 1: rank 1 died; since then rank 2 ended too", "named"),
        ("joining the other ranks: no message exchanged with the other ranks: rank 1 did not come within 8 s", "named"),
        ("ring: no message exchanged with rank 1: it did not join this call", "named"),
        ("ring: no message exchanged with rank 2: it did not join this call", "blamed another"),
        ("ring: rank 0: rank 2 is in call 3, all_reduce; this rank is in call 4", "blamed another"),
        (
            "no message exchanged with the other ranks: reset; the store in which the ranks met is gone",
            "points at rank 0",
        ),
        ("no message: reset; the store in which the ranks met is gone; which was lost cannot be told", "cannot know"),
        (
            "no message: reset; rank 1 and rank 2 did not answer: which of them died cannot be told from here",
            "cannot know",
        ),
        ("no message: reset; rank 0 and rank 2 did not answer: which of them died cannot be told", "blamed another"),
        ("no message exchanged with the other ranks: another rank gave up because one died", "cannot know"),
        ("no message exchanged with the other ranks: reset", "silent"),
    ],
)
def test_what_a_survivor_of_rank_1_says_is_judged(message, judged):
    assert kills.judge_message(message, ours=True, victim=1) == judged
    assert kills.judge_message(message, ours=False, victim=1) == "raw"


def test_a_seed_is_a_case_and_all_kinds_come():
    cases = [kills.case_of(seed, ["gloo", "mpi"]) for seed in range(400)]
    assert cases == [kills.case_of(seed, ["gloo", "mpi"]) for seed in range(400)]
    assert {each.route for each in cases} == {*kills.ROUTES}
    assert {each.phase for each in cases} == {*kills.WINDOWS}
    assert {each.ranks for each in cases} == {2, 3, 4, 5, 6, 8}


def test_a_record_is_gone_on_from(tmp_path):
    case = {"engine": "gloo", "route": "gtopk", "signal": "SIGKILL"}
    good = {"case": case, "phase": "save", "outcomes": {"named": 2}, "slowest_seconds": 1.0, "remarks": []}
    bad = {"case": case, "phase": "save", "outcomes": {"raw": 1}, "slowest_seconds": 3.0, "remarks": ["rank 0: raw"]}
    whole, first = kills.Tally(tmp_path / "whole.json"), kills.Tally(tmp_path / "parts.json")
    for seed, found in enumerate((good, bad, None)):
        whole.add(seed, found)
    first.add(0, good)
    first.save()
    second = kills.Tally(tmp_path / "parts.json")
    second.add(1, bad)
    second.add(2, None)
    assert vars(second) == vars(whole) | {"path": tmp_path / "parts.json", "commits": second.commits}
    assert len(second.commits) == 1
    assert str(whole).startswith("3 cases, 66.67% good")


def test_what_was_not_good_is_run_again_and_kept_apart(tmp_path):
    case = {"engine": "gloo", "route": "gtopk", "signal": "SIGKILL"}
    ends = [
        {"case": {**case, "seed": 0}, "phase": "save", "outcomes": {"named": 2}, "slowest_seconds": 1.0, "remarks": []},
        {
            "case": {**case, "seed": 1},
            "phase": "save",
            "outcomes": {"raw": 1},
            "slowest_seconds": 3.0,
            "remarks": ["!"],
        },
    ]
    first = kills.Tally(tmp_path / "record.json")
    for seed, found in enumerate(ends):
        first.add(seed, found)
    first.save()
    again = kills.Tally(tmp_path / "record.json")
    again.forget_not_good()
    assert (again.seeds, again.not_good) == ({0}, [])
    assert str(again).startswith("1 cases, 100.00% good: {'named': 2}")
    again.save()
    assert [each["case"]["seed"] for each in kills.Tally(tmp_path / "record.json").run_again] == [1]


@pytest.mark.slow
def test_a_rank_is_killed_while_it_trains_and_the_others_name_it():
    command = [sys.executable, kills.__file__, "--engines", "gloo", "--seeds", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "outcomes={'named': 3}" in ran.stdout
