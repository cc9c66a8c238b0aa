from pathlib import Path

import pytest

from penstock.cost.clusters import CLUSTERS
from penstock.reproduce.architectures import densenet
from penstock.reproduce.claim import Kind
from penstock.reproduce.mg_wfbp import K80_COMPUTE_SECONDS, _study, claims, sizes_of
from penstock.trace import trace_from_csv
from penstock.traces import load_shipped

GOOGLENET = Path(__file__).parents[2].parent / "shared" / "data" / "traces" / "googlenet_k80_layers.csv"


def test_the_papers_numbers_match_where_they_should():
    if not GOOGLENET.exists():
        pytest.skip("the authors' GoogLeNet/K80 trace is not beside this checkout (shared/data/traces)")
    verdicts = {claim.key: claim.verdict for claim in claims(trace_from_csv(GOOGLENET, time_column="tmpcomm"))}
    assert verdicts["fig-10/messages"] == "matches"
    assert verdicts["fig-10/wfbp"].startswith("differs by -2.2%: which of")
    assert verdicts["fig-10/single"] == "matches"
    assert "not optimal" in verdicts["theorem-1/the authors' trace/128"]
    assert verdicts["fig-11"] == "matches"


def test_the_papers_own_example_is_no_check_of_ours():
    """It is a + b M by the paper's a and b: nothing of ours is in it."""
    example = next(claim for claim in claims(None) if claim.key == "own/example")
    assert example.kind is Kind.OWN
    assert example.ours == "1.36 to 1.37, 1.76"
    assert example.verdict.startswith("disagree: they are a startup of 1.2 ms")


def test_the_networks_speed_up_is_from_the_authors_trace():
    if not GOOGLENET.exists():
        pytest.skip("the authors' GoogLeNet/K80 trace is not beside this checkout (shared/data/traces)")
    seconds = trace_from_csv(GOOGLENET, time_column="tmpcomm").compute_seconds
    assert seconds == pytest.approx(K80_COMPUTE_SECONDS, abs=5e-5)


def test_all_models_of_table_4_are_counted_and_our_own_trace_shows_figure_10():
    verdicts = {claim.key: claim.verdict for claim in claims(None)}
    for name in ("resnet50", "resnet152", "densenet161", "densenet201", "inception_v4"):
        assert verdicts[f"table-4/{name}/tensors"] == "matches"
        assert verdicts[f"table-4/{name}/parameters"] == "matches"
    assert [verdict for key, verdict in verdicts.items() if key.startswith("fig-10-effect/")] == 3 * ["matches"]


def test_a_sentence_that_is_true_up_to_rounding_says_so():
    best = next(claim for claim in claims(None) if claim.key == "fig-10-effect/best")
    assert best.tolerance == "1e-6: rounding of sums"


def test_wfbp_and_one_message_each_win_where_a_gpu_computes_four_times_as_long():
    """The reason that is given for the row about section 6.3 which differs."""
    for cluster, wins in (("mg-wfbp-v100-10gbe", False), ("mg-wfbp-v100-56gbib", True)):
        for model in ("resnet50", "resnet152", "densenet201", "googlenet"):
            trace = load_shipped(model)
            rows = _study(trace.computing(4 * trace.compute_seconds), CLUSTERS[cluster], [16], "ring")
            assert (rows[16, "wfbp"].iteration_seconds < rows[16, "single"].iteration_seconds) == wins


def test_densenets_are_counted_as_the_shipped_one_is():
    shipped = sorted(tensor.numel for tensor in load_shipped("densenet201").tensors)
    assert sorted(densenet(growth=32, start=64, depths=(6, 12, 48, 32))) == shipped
    assert sum(sizes_of("densenet161")) == 28_681_000  # as torchvision's
    assert sum(sizes_of("inception_v4")) == 42_679_816  # as timm's
