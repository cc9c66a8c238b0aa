from pathlib import Path

import pytest

from penstock.reproduce.mg_wfbp import claims, densenet_sizes, sizes_of
from penstock.trace import trace_from_csv
from penstock.traces import load_shipped

GOOGLENET = Path(__file__).parents[2].parent / "shared" / "data" / "traces" / "googlenet_k80_layers.csv"


def test_the_papers_numbers_match_where_they_should():
    if not GOOGLENET.exists():
        pytest.skip("the authors' GoogLeNet/K80 trace is not beside this checkout (shared/data/traces)")
    verdicts = {claim.what: claim.verdict for claim in claims(trace_from_csv(GOOGLENET, time_column="tmpcomm"))}
    assert verdicts["Fig. 10, GoogLeNet: messages on 4..2048 workers"] == "matches"
    assert verdicts["Fig. 10, GoogLeNet, 64 workers: speed over wfbp"].startswith("differs by -2.2%: which of")
    assert verdicts["Fig. 10, GoogLeNet, 64 workers: speed over single"] == "matches"
    assert "erratum 1" in verdicts["Theorem 1, 128 workers: Algorithm 1 over the optimum"]


def test_all_models_of_table_4_are_counted_and_our_own_trace_shows_figure_10():
    verdicts = {claim.what: claim.verdict for claim in claims(None)}
    for name in ("resnet50", "resnet152", "densenet161", "densenet201", "inception_v4"):
        assert verdicts[f"Table 4, {name}: tensors"] == "matches"
        assert verdicts[f"Table 4, {name}: parameters"] == "matches"
    assert [verdict for what, verdict in verdicts.items() if what.startswith("Fig. 10's effect")] == 3 * ["matches"]


def test_densenets_are_counted_as_the_shipped_one_is():
    shipped = sorted(tensor.numel for tensor in load_shipped("densenet201").tensors)
    assert sorted(densenet_sizes(growth=32, start=64, depths=(6, 12, 48, 32))) == shipped
    assert sum(sizes_of("densenet161")) == 28_681_000  # as torchvision's
    assert sum(sizes_of("inception_v4")) == 42_679_816  # as timm's
