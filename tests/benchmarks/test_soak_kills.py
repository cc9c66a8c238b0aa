"""The campaign of kills: messages are judged strictly, cases follow from seeds, and a record is gone on from."""

import faulthandler
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

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
    assert {each.device for each in cases} == {"cpu"}
    assert min(each.ranks for each in cases if each.route == kills.DEDICATED) == 3


def test_some_routes_and_phases_are_the_cases_of_the_seeds_that_have_them():
    routes = ["onebit by ring", "blocks by servers", "gtopk"]
    cases = kills.chosen_cases(0, 24, ["nccl"], routes, ["backward"])
    assert len(cases) == 24
    assert cases == [kills.case_of(case.seed, ["nccl"]) for case in cases]
    assert ({each.route for each in cases}, {each.phase for each in cases}) == ({*routes}, {"backward"})
    everything = kills.chosen_cases(7, 50, ["gloo"], list(kills.ROUTES), list(kills.WINDOWS))
    assert [each.seed for each in everything] == list(range(7, 57))
    assert kills.chosen_cases(0, 3, ["gloo"], [kills.NEXT_FORWARD], ["profiling"]) == []  # it profiles nothing


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--phases", "backwards"], "no phase called 'backwards'; wanted some of start, "),
        (["--routes", "gtopk"], "--routes and --phases want --out"),
        (["--engines", "nccl,ucc"], "no engine called 'ucc'"),
    ],
)
def test_unknown_names_and_a_part_without_a_record_of_its_own_are_refused(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(sys, "argv", ["kills.py", *arguments])
    with pytest.raises(SystemExit):
        kills.main()
    assert words in capsys.readouterr().err


def test_cases_of_nccl_are_on_a_gpu():
    cases = [kills.case_of(seed, ["nccl"]) for seed in range(200)]
    assert {each.device for each in cases} == {"cuda"}
    assert {each.route for each in cases} == {*kills.OVER["nccl"][0]}


def ended(seed, outcomes, slowest=1.0):
    """Return how a case ended, with a remark where not all is good."""
    case = {"engine": "gloo", "route": "gtopk", "signal": "SIGKILL", "seed": seed}
    remarks = [f"{each}!" for each in outcomes if each not in kills.GOOD]
    return {"case": case, "phase": "save", "outcomes": outcomes, "slowest_seconds": slowest, "remarks": remarks}


def tally_of(path, *ends):
    """Return what a record and these cases make together."""
    tally = kills.Tally("soak-kills", path)
    for found in ends:
        tally.add(found["case"]["seed"], found["case"]["route"], found)
    tally.write()
    return tally


def test_a_record_is_gone_on_from(tmp_path):
    good, bad = ended(0, {"named": 2}), ended(1, {"raw": 1}, 3.0)
    whole = tally_of(tmp_path / "whole.json", good, bad)
    tally_of(tmp_path / "parts.json", good)
    second = tally_of(tmp_path / "parts.json", bad)
    for name in ("cases", "outcomes", "findings", "seeds", "slowest"):
        assert getattr(second, name) == getattr(whole, name)
    assert str(second).startswith("2 cases, 0 not begun, 66.67% good")
    assert json.loads((tmp_path / "parts.json").read_text())["hangs_after"] == kills.LIMIT


def test_what_was_not_good_is_run_again_and_kept_apart(tmp_path):
    tally_of(tmp_path / "record.json", ended(0, {"named": 2}), ended(1, {"raw": 1}))
    again = kills.Tally("soak-kills", tmp_path / "record.json")
    again.forget_findings()
    assert (again.seeds, again.findings, again.good) == ({0}, [], 1.0)
    again.add(1, "gtopk", ended(1, {"named": 1}))
    again.write()
    assert dict(again.totals()) == {"named": 3}
    assert [each["case"]["seed"] for each in kills.Tally("soak-kills", tmp_path / "record.json").earlier] == [1]


@pytest.mark.parametrize(
    ("outcomes", "holds"),
    [
        ({"named": 198, "cannot know": 1, "raw": 1}, True),
        ({"named": 97, "raw": 3}, False),
        ({"named": 999, "hangs": 1}, False),
        ({"named": 999, "hangs at exit": 1}, False),
    ],
)
def test_a_hang_or_more_than_one_in_a_hundred_that_is_not_good_fails(outcomes, holds, tmp_path, monkeypatch):
    tally_of(tmp_path / "record.json", ended(0, outcomes))
    monkeypatch.setattr(sys, "argv", ["kills.py", "--cases", "1", "--out", str(tmp_path / "record.json")])
    assert kills.main() == (0 if holds else 1)


def test_the_record_is_the_repositorys_wherever_the_script_is_started():
    assert Path(__file__).parents[2] / "benchmarks" / "results" == kills.RESULTS


def test_a_rank_that_hangs_is_seen_where_it_is(tmp_path):
    errors = tmp_path / "rank-0.err"
    with open(errors, "w") as file:
        faulthandler.dump_traceback(file)
    assert kills.last_stack(errors).startswith("test_soak_kills.py:")


@pytest.mark.slow
def test_a_rank_is_killed_while_it_trains_and_the_others_name_it():
    command = [sys.executable, kills.__file__, "--engines", "gloo", "--seeds", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "'outcomes': {'named': 3}" in ran.stdout


def test_cases_that_never_began_are_run_again(tmp_path):
    tally = tally_of(tmp_path / "record.json", ended(0, {"named": 2}))
    tally.add(1, "gtopk", None)
    tally.write()
    again = kills.Tally("soak-kills", tmp_path / "record.json")
    assert (again.seeds, again.not_begun) == ({0, 1}, [1])
    again.forget_findings()
    assert (again.seeds, again.not_begun) == ({0}, [])


@pytest.mark.parametrize(("not_begun", "holds"), [(0, True), (1, True), (2, False)])
def test_a_route_of_which_more_than_one_case_in_a_hundred_never_began_fails(tmp_path, not_begun, holds):
    """However many cases of other routes there are."""
    tally = tally_of(tmp_path / "record.json", *(ended(seed, {"named": 2}) for seed in range(300)))
    for seed in range(300, 400 - not_begun):
        tally.add(
            seed, "dense ring", ended(seed, {"named": 2}) | {"case": ended(seed, {})["case"] | {"route": "dense ring"}}
        )
    for seed in range(400 - not_begun, 400):
        tally.add(seed, "dense ring", None)
    tally.write()
    assert tally.holds == kills.Tally("soak-kills", tmp_path / "record.json").holds == holds


def test_cases_of_a_route_are_run_anew_and_the_commit_of_the_others_is_kept(tmp_path):
    seeds = {kills.case_of(seed, ["gloo"]).route: seed for seed in range(100)}
    ends = [ended(seeds[route], {"named": 2}) for route in ("gtopk", kills.DEDICATED)]
    ends[1]["case"]["route"] = kills.DEDICATED
    commit = tally_of(tmp_path / "record.json", *ends).notes.get("commit")
    again = kills.Tally("soak-kills", tmp_path / "record.json")
    again.forget_route(kills.DEDICATED, ["gloo"])
    again.write()
    record = json.loads((tmp_path / "record.json").read_text())
    assert commit is None
    assert (again.seeds, [row["route"] for row in record["rows"]]) == ({seeds["gtopk"]}, ["gtopk"])
    assert record["rest"]["without"] == kills.DEDICATED
    assert record["rest"]["commit"] == record["commit"]


@pytest.mark.slow
@pytest.mark.parametrize("route", kills.ROUTES)
def test_every_route_begins_and_its_server_or_last_rank_is_killed(route, tmp_path):
    """In a process of its own: ranks are forked from one that has no threads."""
    script = f"""
from dataclasses import replace
from soak import kills
case = replace(kills.case_of(0, ["gloo"]), route={route!r}, engine="gloo", ranks=3, victim=2, phase="between", nth=2,
               signal="SIGKILL", handled=False, store="file", planner="wfbp", timeout_seconds=30.0)
found = kills.run_case(case)
print("never began" if found is None else found.outcomes)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert ran.stdout.strip() == "{'named': 2}", ran.stdout + ran.stderr


def test_all_cases_are_run_each_once_and_none_is_begun_too_late(monkeypatch):
    cases = [kills.case_of(seed, ["gloo"]) for seed in range(20)]
    monkeypatch.setattr(kills, "run_until_killed", lambda case, logs: None)
    assert sorted(seed for seed, _ in kills.run_all(cases, 3, 60.0, None)) == list(range(20))
    assert list(kills.run_all(cases, 3, 0.0, None)) == []


def test_the_store_beside_the_ranks_answers_until_it_is_ended(tmp_path):
    case = kills.case_of(0, ["nccl"])
    keeper = kills.choose_port(case, tmp_path)
    store = kills.dist.TCPStore("127.0.0.1", int((tmp_path / "port").read_text()), timeout=timedelta(seconds=20))
    store.set("name", "value")
    assert store.get("name") == b"value"
    kills._end(keeper)
    with pytest.raises(kills.dist.DistNetworkError):
        store.get("name")
