"""Every verdict can fail: a constant behind each table and figure is changed, and what held does not hold any more."""

import json
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from penstock.curves import Curve
from penstock.network import LinearCost
from penstock.planners import PLANNERS
from penstock.reproduce import gtop_k, hipress, hipress_fig_11, hipress_table_7, linear_pipeline, mg_wfbp
from penstock.reproduce.claim import (
    Kind,
    check_at_most,
    check_equal,
    check_printed,
    check_within,
    compare_measured,
    counts,
    not_here,
)
from penstock.strategies.closed_form import LinearCost as Line
from penstock.trace import trace_from_csv
from penstock.traces import load_shipped

GOOGLENET = Path(__file__).parents[2].parent / "shared" / "data" / "traces" / "googlenet_k80_layers.csv"
PAPERS = {"mg_wfbp": mg_wfbp, "gtop_k": gtop_k, "linear_pipeline": linear_pipeline, "hipress": hipress}


def claims_of(paper):
    if paper != "mg_wfbp":
        return PAPERS[paper].claims()
    return mg_wfbp.claims(trace_from_csv(GOOGLENET, time_column="tmpcomm") if GOOGLENET.exists() else None)


def held(paper):
    return {claim.what for claim in claims_of(paper) if claim.holds}


held_before = cache(held)


def group(what):
    """Return the table, figure or section that a row belongs to."""
    return re.match(r"[^,:]+", what)[0]


def slower(seconds):
    return lambda *arguments: 1.1 * seconds(*arguments)


def more(count):
    return lambda *arguments: count(*arguments) + 1


def in_place_of(name, planner):
    return {**PLANNERS, name: replace(PLANNERS[planner], name=name)}


def dearer_line(clusters):
    network = clusters["mg-wfbp-k80-10gbe"]
    return {**clusters, "mg-wfbp-k80-10gbe": replace(network, all_reduce={"ring": LinearCost(2e-3, 1.97e-9)})}


def with_alpha(network, alpha):
    return replace(network, alpha_seconds=alpha)


OTHER_MODEL = {"vgg19": "resnet50", "resnet50": "lstm_ptb", "bert_base": "vgg16", "bert_large": "vgg16"}
CHANGES = [  # (paper, module, name, its new value, group that must fail)
    ("mg_wfbp", mg_wfbp, "program_seconds", slower(mg_wfbp.program_seconds), "Table 2"),
    ("mg_wfbp", mg_wfbp, "STARTUPS_US", {2: "90.52", 4: "271.50", 8: "633.70"}, "conference version"),
    ("mg_wfbp", mg_wfbp, "sizes_of", lambda model, sizes=mg_wfbp.sizes_of: 2 * sizes(model), "Table 4"),
    ("mg_wfbp", mg_wfbp, "sizes_of", lambda model, sizes=mg_wfbp.sizes_of: 2 * sizes(model), "Fig. 5"),
    ("mg_wfbp", mg_wfbp, "PLANNERS", in_place_of("greedy", "wfbp"), "Fig. 9's sentence"),
    ("mg_wfbp", mg_wfbp, "NETWORK", with_alpha(mg_wfbp.NETWORK, 4.525e-3), "Fig. 10's effect"),
    ("mg_wfbp", mg_wfbp, "NETWORK", with_alpha(mg_wfbp.NETWORK, 90.5e-6), "Fig. 10"),
    ("mg_wfbp", mg_wfbp, "PLANNERS", in_place_of("wfbp", "single"), "Fig. 11"),
    ("mg_wfbp", mg_wfbp, "CLUSTERS", dearer_line(mg_wfbp.CLUSTERS), "Introduction"),
    ("gtop_k", gtop_k, "program_seconds", slower(gtop_k.program_seconds), "Table I"),
    ("gtop_k", gtop_k, "gtop_k", lambda network, p, density: Line(0.0, (p - 3.5) * 1e-10), "Fig. 9 left"),
    ("gtop_k", gtop_k, "NETWORK", replace(gtop_k.NETWORK, beta_seconds_per_byte=0.0), "Fig. 9 right"),
    ("linear_pipeline", linear_pipeline, "count_steps", more(linear_pipeline.count_steps), "Fig. 2c"),
    ("linear_pipeline", linear_pipeline, "count_steps", more(linear_pipeline.count_steps), "section 3"),
    ("linear_pipeline", linear_pipeline, "count_steps", more(linear_pipeline.count_steps), "Fig. 4"),
    ("linear_pipeline", linear_pipeline, "program_seconds", slower(linear_pipeline.program_seconds), "Table 1"),
    ("linear_pipeline", linear_pipeline, "BLOCK", 16 << 20, "Eq. 2"),
    ("linear_pipeline", linear_pipeline, "BLOCK", 16 << 20, "Eq. 3"),
    ("linear_pipeline", linear_pipeline, "BLOCK", 1 << 20, "section 4.1"),
    ("linear_pipeline", linear_pipeline, "BLOCK", 1 << 20, "section 3.2"),
    ("linear_pipeline", linear_pipeline, "TABLE_2", {"AlexNet": (0.7, 0.92, 0.005, "45.5%"),
                                                     "GoogLeNet": (0.05, 0.267, 0.0005, "14.7%")}, "Table 2"),
    ("linear_pipeline", linear_pipeline, "layers_seconds", linear_pipeline.all_reduce_seconds, "section 4.2"),
    ("hipress", hipress, "payload_nbytes", slower(hipress.payload_nbytes), "section 2.4"),
    ("hipress", hipress, "program_seconds", slower(hipress.program_seconds), "Table 3"),
    ("hipress", hipress, "program_seconds", slower(hipress.program_seconds), "section 6.1"),
    ("hipress", hipress, "TABLE_5", dict.fromkeys(hipress.TABLE_5, (5, 0, 7)), "Table 5"),
    ("hipress", hipress, "load_shipped", lambda name: load_shipped(OTHER_MODEL[name]), "Table 6"),
    ("hipress", hipress_table_7, "SEND", Curve(0.0, 1e-9), "Table 7"),
    ("hipress", hipress_fig_11, "CPU_SLOWDOWN", 0.01, "Fig. 11"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("paper", "module", "name", "value", "failing"), CHANGES, ids=[f"{each[0]}-{each[4]}" for each in CHANGES]
)
def test_changing_a_constant_fails_the_verdict(monkeypatch, paper, module, name, value, failing):
    before = {what for what in held_before(paper) if group(what) == failing}
    if not before:
        pytest.skip("needs the authors' GoogLeNet/K80 trace, which is not beside this checkout (shared/data/traces)")
    monkeypatch.setattr(module, name, value)
    after = held(paper) & before
    most = 3 if failing == "Table 7" else 0  # whose other cells do not depend on the curve
    assert len(after) <= most
    assert len(after) < len(before)


@pytest.mark.parametrize("paper", PAPERS)
def test_every_table_and_figure_that_holds_is_changed_above(paper):
    changed = {each[4] for each in CHANGES if each[0] == paper}
    assert {group(what) for what in held_before(paper)} <= changed


@pytest.mark.parametrize("paper", PAPERS)
def test_every_row_is_of_one_kind_and_says_why(paper):
    found = claims_of(paper)
    assert len({claim.what for claim in found}) == len(found)
    for claim in found:
        if claim.kind is Kind.CHECKED:
            assert claim.holds == claim.verdict.startswith("matches")
            assert claim.tolerance
            assert claim.holds or len(claim.verdict) > 30, claim
        elif claim.kind is Kind.MEASURED:
            assert claim.holds is None
            assert "match" not in claim.verdict
            assert claim.how.endswith(".json")
        else:
            assert claim.verdict.startswith("not checked: ")
            assert len(claim.verdict) > 25


LISTED = {  # what issue 21 asks for: each is a row, or listed with the reason
    "mg_wfbp": ["Fig. 4", "Fig. 5", "Fig. 6", "Fig. 7", "Fig. 8", "Fig. 9", "Table 4"],
    "gtop_k": ["Fig. 5", "Fig. 6", "Fig. 7", "Fig. 8", "Fig. 10", "Fig. 11", "Fig. 12"],
    "linear_pipeline": ["Fig. 3", "Fig. 4", "Fig. 5", "Table 2", "Table 1"],
    "hipress": ["Table 1", "Table 6", "Fig. 7 and 8", "Fig. 9", "Fig. 10", "Fig. 12a", "Fig. 12b", "Fig. 13"],
}


@pytest.mark.parametrize("paper", PAPERS)
def test_no_table_or_figure_is_left_out(paper):
    groups = {group(claim.what) for claim in claims_of(paper)}
    assert set(LISTED[paper]) <= groups


def test_printed_numbers_hold_to_half_of_their_last_digit():
    assert check_printed("x", "1.78", 1.7849, "computed").verdict == "matches"
    assert check_printed("x", "1.78", 1.786, "computed", "of the moon").verdict == "differs by +0.3%: of the moon"
    assert check_printed("x", "1.78", 1.78, "computed").tolerance == "0.005: half of the last printed digit"
    assert check_printed("x", "~25.5M", 25_557_032, "counted").holds
    assert not check_printed("x", "25.5M", 25_557_032, "counted").holds
    assert check_printed("x", "41.2%", 20.8, "computed", "so").verdict == "differs by -20.4 points: so"
    assert check_within("x", "45.5%", 45.7, 0.3, "rounding", "computed").tolerance == "0.3: rounding"


def test_other_verdicts_and_their_counts():
    found = [
        check_equal("x", 1, 1, "counted"),
        check_equal("x", 1, 2, "counted", "because"),
        check_at_most("x", (3, 2), (3, 3), "counted"),
        compare_measured("x", 2.0, 2.1, "a.json"),
        not_here("x", "no data"),
    ]
    assert [claim.verdict for claim in found] == [
        "matches", "differs: because", "differs: more", "measured +5.0% from the formula", "not checked: no data",
    ]  # fmt: skip
    assert counts(found) == (
        "3 checked against what the papers print: 1 hold, 2 differ; 1 formulas beside measurements of ours; "
        "1 not checkable here"
    )


def test_shipped_measurements_are_those_of_the_records(monkeypatch):
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    import papers_measured

    assert json.loads(papers_measured.SHIPPED.read_text()) == papers_measured.selected()
