from pathlib import Path

import pytest

from penstock.reproduce.claim import compare_exactly, compare_numbers
from penstock.reproduce.mg_wfbp import claims
from penstock.trace import trace_from_csv

GOOGLENET = Path(__file__).parents[2].parent / "shared" / "data" / "traces" / "googlenet_k80_layers.csv"


def test_the_papers_numbers_match_where_they_should():
    if not GOOGLENET.exists():
        pytest.skip("the authors' GoogLeNet/K80 trace is not beside this checkout (shared/data/traces)")
    verdicts = {claim.what: claim.verdict for claim in claims(trace_from_csv(GOOGLENET, time_column="tmpcomm"))}
    assert verdicts["Fig. 10, GoogLeNet: messages on 4..2048 workers"] == "matches"
    assert verdicts["Fig. 10, GoogLeNet, 64 workers: speed over wfbp"].startswith("differs by 2.2%: the log")
    assert verdicts["Fig. 10, GoogLeNet, 64 workers: speed over single"].startswith("matches within")
    assert "erratum 1" in verdicts["Theorem 1, 128 workers: greedy over the optimum"]


def test_tables_that_need_no_trace_are_computed_without():
    verdicts = {claim.what: claim.verdict for claim in claims(None)}
    for name in ("resnet50", "resnet152", "densenet201"):
        assert verdicts[f"Table 4, {name}: tensors"] == "matches"
        assert verdicts[f"Table 4, {name}: parameters"].startswith("matches within")


def test_verdicts():
    assert compare_numbers("x", 2.0, 2.01, "computed", 0.01).verdict == "matches within 0.5%"
    assert compare_numbers("x", 2.0, 3.0, "computed", 0.01, "of the moon").verdict == "differs by 50.0%: of the moon"
    assert compare_exactly("x", [1], [1], "computed").verdict == "matches"
    assert compare_exactly("x", 1, 2, "computed", "rounding").verdict == "differs: rounding"
