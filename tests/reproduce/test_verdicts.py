"""Every verdict can fail: for each claim that holds, a constant behind it is changed, and it does not hold any more.

So do a paper's own numbers that agree; and a formula beside a measurement moves with the constants of its hosts.
"""

import json
import sys
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

from penstock.curves import CodecCurves, Curve
from penstock.planners import PLANNERS
from penstock.reproduce import claim as claim_module
from penstock.reproduce import gtop_k, hipress, hipress_table_7, linear_pipeline, mg_wfbp
from penstock.reproduce.claim import (
    Kind,
    check_at_most,
    check_equal,
    check_printed,
    check_statement,
    compare_measured,
    compare_own,
    counts,
    not_here,
)
from penstock.reproduce.hipress_fig_11 import replayed_seconds
from penstock.trace import trace_from_csv

GOOGLENET = Path(__file__).parents[2].parent / "shared" / "data" / "traces" / "googlenet_k80_layers.csv"
PAPERS = {"mg_wfbp": mg_wfbp, "gtop_k": gtop_k, "linear_pipeline": linear_pipeline, "hipress": hipress}


timed_once = {}


@pytest.fixture(autouse=True)
def _simulating_each_iteration_once(monkeypatch):
    """No constant that is changed here is one of a replayed iteration's row, but where the row itself is changed."""

    def seconds(row):
        key = json.dumps(row)
        timed_once[key] = timed_once.get(key) or replayed_seconds(row)
        return timed_once[key]

    monkeypatch.setattr(hipress, "replayed_seconds", seconds)


def claims_of(paper):
    if paper != "mg_wfbp":
        return PAPERS[paper].claims()
    return mg_wfbp.claims(trace_from_csv(GOOGLENET, time_column="tmpcomm") if GOOGLENET.exists() else None)


claims_before = cache(claims_of)


def held(claims):
    return {claim.key for claim in claims if claim.holds}  # checked ones, and a paper's own numbers that agree


def slower(seconds):
    return lambda *arguments: 1.1 * seconds(*arguments)


def more(count):
    return lambda *arguments: count(*arguments) + 1


def in_place_of(name, planner):
    return {**PLANNERS, name: replace(PLANNERS[planner], name=name)}


def with_alpha(network, factor):
    return replace(network, alpha_seconds=factor * network.alpha_seconds)


def with_seconds(models, comm):
    return {name: replace(model, comm=comm) for name, model in models.items()}


def with_throughputs(models, *throughputs):
    return tuple(replace(model, throughputs=throughputs, over_dense="9.9x") for model in models)


def doubled(sizes):
    return lambda model: 2 * [2 * size for size in sizes(model)]


FREE = CodecCurves(1 / 16, Curve(0.0, 0.0), Curve(0.0, 0.0))
CHANGES = [  # (paper, module, name, its new value, which claims do not hold any more)
    ("mg_wfbp", mg_wfbp, "program_seconds", slower(mg_wfbp.program_seconds), "table-2/*"),
    ("mg_wfbp", mg_wfbp, "STARTUPS_US", {2: "90.52", 4: "271.50", 8: "633.70"}, "startups/*"),
    ("mg_wfbp", mg_wfbp, "PLOTTED", {"GoogLeNet": ("1006.4", "889.28", "1310.88")}, "own/fig-6"),
    ("mg_wfbp", mg_wfbp, "sizes_of", doubled(mg_wfbp.sizes_of), "table-4/*"),
    ("mg_wfbp", mg_wfbp, "sizes_of", doubled(mg_wfbp.sizes_of), "fig-5/*"),
    ("mg_wfbp", mg_wfbp, "PLANNERS", in_place_of("greedy", "wfbp"), "fig-9/mg*"),
    ("mg_wfbp", mg_wfbp, "PLANNERS", in_place_of("wfbp", "single"), "fig-9/densenet"),
    ("mg_wfbp", mg_wfbp, "PLANNERS", in_place_of("greedy", "wfbp"), "fig-10-effect/best"),
    ("mg_wfbp", mg_wfbp, "NETWORK", with_alpha(mg_wfbp.NETWORK, 100), "fig-10-effect/c*"),
    ("mg_wfbp", mg_wfbp, "NETWORK", with_alpha(mg_wfbp.NETWORK, 2), "fig-10/*"),
    ("mg_wfbp", mg_wfbp, "PLANNERS", in_place_of("wfbp", "single"), "fig-11"),
    ("gtop_k", gtop_k, "NETWORK", with_alpha(gtop_k.NETWORK, 5), "table-1/*"),
    ("gtop_k", gtop_k, "FEW_WORKERS", 8, "fig-9/few"),
    ("gtop_k", gtop_k, "WORKERS", 4, "fig-9/many"),
    ("gtop_k", gtop_k, "NETWORK", replace(gtop_k.NETWORK, beta_seconds_per_byte=0.0), "fig-9/sizes"),
    ("gtop_k", gtop_k, "MODELS", with_throughputs(gtop_k.MODELS, "100", "100", "100"), "own/*"),
    ("linear_pipeline", linear_pipeline, "MODELS", with_seconds(linear_pipeline.MODELS, "9.99"), "own/*"),
    ("linear_pipeline", linear_pipeline, "count_steps", more(linear_pipeline.count_steps), "fig-2c"),
    ("linear_pipeline", linear_pipeline, "count_steps", more(linear_pipeline.count_steps), "section-3"),
    ("linear_pipeline", linear_pipeline, "count_steps", more(linear_pipeline.count_steps), "fig-4"),
    ("linear_pipeline", linear_pipeline, "program_seconds", slower(linear_pipeline.program_seconds), "table-1/*"),
    ("linear_pipeline", linear_pipeline, "numel_of", slower(linear_pipeline.numel_of), "table-2/*"),
    ("linear_pipeline", linear_pipeline, "BLOCK", 16 << 20, "eq-*"),
    ("linear_pipeline", linear_pipeline, "BLOCK", 1 << 20, "section-4.1"),
    ("linear_pipeline", linear_pipeline, "BLOCK", 1 << 20, "section-3.2"),
    ("linear_pipeline", linear_pipeline, "layers_seconds", linear_pipeline.all_reduce_seconds, "section-4.2/*"),
    ("hipress", hipress, "payload_nbytes", slower(hipress.payload_nbytes), "section-2.4/*"),
    ("hipress", hipress, "program_seconds", slower(hipress.program_seconds), "table-3/*"),
    ("hipress", hipress, "program_seconds", slower(hipress.program_seconds), "section-6.1/*"),
    ("hipress", hipress, "TABLE_5", dict.fromkeys(hipress.TABLE_5, (5, 0, 7, 1)), "table-5/*"),
    ("hipress", hipress, "TABLE_5", dict.fromkeys(hipress.TABLE_5, (5, 0, 7, 1)), "own/table-5/[mo]*"),
    ("hipress", hipress, "TABLE_1", {("0.61", "0.47"): "35.0%"}, "own/table-1"),
    ("hipress", hipress, "GAINS_BERT_LARGE", ("32.3%", "44.5%", "23.3%"), "own/section-6.2"),
    ("hipress", hipress, "GAINS_VGG19", ("110.5%", "61.4%"), "own/vgg19"),
    ("hipress", hipress, "GAINS_TRANSFORMER", ("101.4%", "42.1%"), "own/transformer/dgc"),
    ("hipress", hipress, "BEST_SPEEDUP", "1.8x", "own/expected"),
    ("hipress", hipress, "OVER_BYTEPS_ONEBIT", "79.5%", "own/improvements"),
    ("hipress", hipress, "ALSO_WRITTEN", {"adacomp": {"map"}, "3lc": {"map"}}, "section-4.4/[a3]*"),
    ("hipress", hipress, "ENCODE_3LC_LINES", 30, "section-4.4/lines"),
    ("hipress", hipress, "nbytes_of", doubled(hipress.nbytes_of), "table-6/*"),
    ("hipress", hipress_table_7, "SEND", Curve(0.0, 1e-9), "table-7/*/4/*"),
    ("hipress", hipress_table_7, "SEND", Curve(0.0, 1e-9), "table-7/*/16/392"),
    ("hipress", hipress_table_7, "ONEBIT", FREE, "table-7/Ring/16/4"),
]  # fmt: skip
AFTER = {}  # what holds after a change, by paper and name of what was changed


@pytest.mark.parametrize(
    ("paper", "module", "name", "value", "failing"), CHANGES, ids=[f"{each[0]}-{each[4]}" for each in CHANGES]
)
def test_changing_a_constant_fails_the_verdict(monkeypatch, paper, module, name, value, failing):
    before = {key for key in held(claims_before(paper)) if fnmatchcase(key, failing)}
    if not before and not GOOGLENET.exists():
        pytest.skip("needs the authors' GoogLeNet/K80 trace, which is not beside this checkout (shared/data/traces)")
    assert before
    monkeypatch.setattr(module, name, value)
    kind = paper, name, str(value)
    if kind not in AFTER:
        AFTER[kind] = held(claims_of(paper))
    assert not AFTER[kind] & before


@pytest.mark.parametrize("paper", PAPERS)
def test_every_claim_that_holds_is_changed_above(paper):
    patterns = [each[4] for each in CHANGES if each[0] == paper]
    assert not [key for key in held(claims_before(paper)) if not any(fnmatchcase(key, pattern) for pattern in patterns)]


CONSTANTS = ("alpha_seconds", "beta_seconds_per_byte", "gamma_seconds_per_byte", "a_seconds", "b_seconds_per_byte")


def twice_as_slow(row):
    found = row | {name: 2 * row[name] for name in CONSTANTS if row.get(name)}
    if "network" not in row:
        return found
    lines = row["network"]["all_reduce"]
    slow = {route: {name: 2 * value for name, value in line.items()} for route, line in lines.items()}
    network = twice_as_slow(row["network"]) | {"all_reduce": slow}
    return found | {"network": network}


@pytest.mark.parametrize("paper", PAPERS)
def test_every_formula_beside_a_measurement_moves_with_the_constants_of_its_hosts(monkeypatch, paper):
    """Twice the constants of a row are twice the formula of a collective, and a longer iteration; the verdict moves."""
    before = {claim.key: claim for claim in claims_before(paper) if claim.kind is Kind.MEASURED}
    slow = [record | {"rows": [twice_as_slow(row) for row in record["rows"]]} for record in claim_module._shipped()]
    monkeypatch.setattr(claim_module, "_shipped", lambda: slow)
    after = {claim.key: claim for claim in claims_of(paper) if claim.kind is Kind.MEASURED}
    assert before
    assert set(after) == set(before)
    for key, claim in before.items():
        old, new = (float(each.published) for each in (claim, after[key]))
        if key.startswith(("eq-10/", "sparse/", "measured/")):
            assert new == pytest.approx(2 * old, rel=1e-3)  # four digits are printed
        assert new > old, key
        assert after[key].verdict != claim.verdict, key
        assert after[key].ours == claim.ours, key


# By how much some steps are simulated otherwise now than when they were measured: those of 2026-11-17 in which every
# tensor is a message. Since then small messages take what so many instructions took (4d7181b), and cores that a route
# takes stay taken (d5958f0). The simulator of that day gives these rows the times that their records have.
SIMULATED_OTHERWISE = {
    ("casync-vgg-4-hosts.json", "+ codec"): -0.0462,
    ("casync-vgg-4-hosts.json", "+ pipelining"): 0.0192,
    ("casync-vgg-8-hosts.json", "+ codec"): -0.1449,
    ("casync-vgg-8-hosts.json", "+ pipelining"): -0.0045,
}


def test_steps_on_emulated_hosts_are_simulated_as_they_were_when_measured():
    """On the records' networks, by the plans that were replayed."""
    folder = Path(__file__).parents[2] / "benchmarks" / "results"
    found = {(claim.how, claim.key.removeprefix("fig-11-measured/")): float(claim.published)
             for claim in claims_before("hipress") if claim.kind is Kind.MEASURED}  # fmt: skip
    for record in {how for how, _ in found}:
        for row in json.loads((folder / record).read_text())["rows"]:
            slower = f" in {row['slower']:g}x slow motion" if "slower" in row else ""
            formula = found[record, f"{row['what']}/{row['how']}/{row['hosts']}/{row['rate']}{slower}"]
            otherwise = SIMULATED_OTHERWISE.get((record, row["how"]), 0.0)
            assert formula / row["simulated_seconds"] - 1 == pytest.approx(otherwise, abs=5e-4), (record, row["how"])


def test_formulas_of_replayed_iterations_are_those_of_the_records():
    """What is computed now, from a line and a trace, is what was simulated when it was measured."""
    folder = Path(__file__).parents[2] / "benchmarks" / "results"
    found = {(claim.how, claim.key): float(claim.published) for claim in claims_before("mg_wfbp")
             if claim.key.startswith("replay/")}  # fmt: skip
    checked = 0
    for record in ("replay", "replay-8-hosts", "replay-8-hosts-large", "gains"):
        for row in json.loads((folder / f"{record}.json").read_text())["rows"]:
            place = f"{row['hosts']}/{row.get('rate', '1gbit')}/{row.get('latency_seconds', 0.0):g}"
            formula = found.get((f"{record}.json", f"replay/{row['what']}/{row['how']}/{place}"))
            if row["how"] != "threshold":
                assert formula == pytest.approx(row["simulated_seconds"], rel=1e-3)
                checked += 1
    assert checked == len(found)


@pytest.mark.parametrize("paper", PAPERS)
def test_every_row_is_of_one_kind_and_says_why(paper):
    found = claims_before(paper)
    assert len({claim.key for claim in found}) == len({claim.what for claim in found}) == len(found)
    for claim in found:
        if claim.kind is Kind.CHECKED:
            assert claim.holds == claim.verdict.startswith(("matches", "no more"))
            assert ":" in claim.tolerance
            assert claim.holds or len(claim.verdict) > 30, claim
        elif claim.kind is Kind.OWN:
            assert claim.verdict == "agree" if claim.holds else claim.verdict.startswith("disagree: ")
        elif claim.kind is Kind.MEASURED:
            assert claim.holds is None
            assert "match" not in claim.verdict
            assert claim.how.endswith(".json")
        else:
            assert claim.verdict.startswith("not checked: ")
            assert len(claim.verdict) > 25


LISTED = {  # every table and figure with numbers: each is a row, or listed with the reason
    "mg_wfbp": ["table-2", "table-4", *(f"fig-{number}" for number in range(4, 12))],
    "gtop_k": ["table-1", "table-7", *(f"fig-{number}" for number in range(5, 13))],
    "linear_pipeline": ["table-1", "table-2", *(f"fig-{number}" for number in (3, 4, 5)), "section-4.2"],
    "hipress": ["table-1", "table-3", "table-5", "table-6", "table-7",
                *(f"fig-{number}" for number in (7, 8, 9, 10, 11, "12a", "12b", 13))],
}  # fmt: skip


@pytest.mark.parametrize("paper", PAPERS)
def test_no_table_or_figure_is_left_out(paper):
    assert set(LISTED[paper]) <= {claim.key.split("/")[0] for claim in claims_before(paper)}


def test_printed_numbers_hold_to_half_of_their_last_digit():
    def check(*arguments, **others):
        return check_printed("k", "x", *arguments, **others)

    assert check("1.78", 1.7849, "computed").verdict == "matches"
    assert check("1.78", 1.786, "computed", "of the moon").verdict == "differs by +0.3%: of the moon"
    assert check("1.78", 1.78, "computed").tolerance == "0.005: half of the last printed digit"
    assert not check("25.5M", 25_557_032, "counted").holds
    assert check("41.2%", 20.8, "computed", "so").verdict == "differs by -20.4 points: so"
    assert check(("1.5x", "2.70x"), (1.54, 2.704), "computed").holds
    assert check(("1.5x", "2.70x"), (1.54, 2.706), "computed", "so").verdict == "differs by +2.7%, +0.2%: so"
    assert check("1.0x", 1.0, "simulated", source="'the same'").published == "1.0x ('the same')"


def test_a_number_after_a_tilde_was_cut_off():
    assert check_printed("k", "x", "~25.5M", 25_557_032, "counted").holds
    assert not check_printed("k", "x", "~25.5M", 25_499_999, "counted").holds
    assert check_printed("k", "x", "~20M", 20_013_928, "counted").tolerance == (
        "+1M: cut off after the last printed digit"
    )


def test_a_papers_own_numbers_agree_where_their_roundings_overlap():
    assert compare_own("k", "x", "45.5%", [(45.3, 45.9)], "computed").verdict == "agree"
    assert compare_own("k", "x", "1.91x", [(1.68, 1.85)], "computed", "so").verdict == "disagree: so"
    assert compare_own("k", "x", ("1.9x", "2.0x"), [(1.8, 1.86), (3.0, 3.0)], "computed", "so").holds is False
    assert compare_own("k", "x", "2", [(1.9, 2.1)], "computed").tolerance == "the rounding of all printed numbers"
    exact = "0.5: half of the last printed digit, the others as printed"
    assert compare_own("k", "x", "2", [(2.0, 2.0)], "computed").tolerance == exact


def test_other_verdicts_and_their_counts():
    found = [
        check_equal("k", "x", 1, 1, "counted"),
        check_equal("k", "x", 1, 2, "counted", "because"),
        check_statement("k", "x", True, "simulated", "2.00x"),
        check_at_most("k", "x", (3, 2), (3, 3), "counted"),
        check_at_most("k", "x", (3, 2), (3, 1), "counted"),
        compare_measured("k", "x", 2.0, 2.1, "a.json"),
        compare_own("k", "x", "2", [(2.0, 2.0)], "computed"),
        not_here("k", "x", "no data"),
    ]
    assert [claim.verdict for claim in found] == [
        "matches", "differs: because", "matches", "differs: more than printed", "no more than printed",
        "measured +5.0% from the formula", "agree", "not checked: no data",
    ]  # fmt: skip
    assert found[2].ours == "yes: 2.00x"
    assert found[2].tolerance == "none: whole numbers, names or statements"
    assert counts(found) == (
        "5 checked against what the papers print: 2 match, 1 are no more than printed, 2 differ; 1 formulas beside "
        "measurements of ours; 1 not checkable here; 1 comparisons of the papers' own numbers: 1 agree, 0 do not"
    )


NEWEST = [  # of a number of hosts, all of whose rows but the engine's own have a formula
    "collectives-4-hosts-16-mb", "collectives-2-8-hosts-16-mb", "replay", "replay-8-hosts", "replay-8-hosts-large",
    "gains",
    *(f"casync-{model}-{hosts}-hosts{how}" for how in ("", "-slow", "-10gbit") for hosts in (4, 8)
      for model in ("vgg", "bert") if (how, hosts, model) != ("-slow", 8, "bert")), "gtop-k-table-7",
]  # fmt: skip


def test_shipped_measurements_are_those_of_the_records(monkeypatch):
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    import papers_measured

    assert json.loads(papers_measured.SHIPPED.read_text()) == papers_measured.selected()
    written = {record: json.loads((folder / "results" / f"{record}.json").read_text()) for record in NEWEST}
    for record, found in written.items():
        shipped = next(
            each["rows"] for each in papers_measured.selected()["records"] if each["record"] == record + ".json"
        )
        dense = [row for row in found["rows"] if row.get("strategy") != "native"]
        assert len(shipped) == len(dense), "rows in which formula and measurement are far apart are rows too"
