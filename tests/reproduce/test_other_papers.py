"""Which published numbers come out, and which do not: a change of either is news."""

from penstock.reproduce import gtop_k, hipress, linear_pipeline


def verdicts(claims):
    return {claim.what: claim.verdict for claim in claims}


def test_gtop_ks_formulas_match_and_its_clusters_throughput_does_not():
    found = verdicts(gtop_k.claims())
    assert all(verdict.startswith("matches") for what, verdict in found.items() if what.startswith("Table I,"))
    assert found["Fig. 9 left: gTop-k faster on 32"] == "matches"
    assert "that cluster was slower than its model" in found["Table VII, AlexNet: g/d"]


def test_wangs_steps_and_limits_match():
    found = verdicts(linear_pipeline.claims())
    assert found["Fig. 2c: steps of an all-reduce of 4 blocks on 3 GPUs"] == "matches"
    assert found["section 3: reduce and then broadcast"] == "matches"
    assert found["section 3.2: broadcast on 8 GPUs over that on 2, 256 MB"].startswith("matches")
    assert "one block too many" in found["Table 1, broadcast by linear_pipeline, 4 ranks, 1 MB (s)"]
    assert found["section 4.2: overlapping beats both others"] == "matches"
    assert "every 5th time" in found["section 4.2: all-reduce beats reduce and broadcast"]


def test_seven_of_hipress_twelve_cells_match():
    """Erratum 7 says seven, found independently with the same constants."""
    found = verdicts(hipress.claims())
    cells = [verdict for what, verdict in found.items() if what.startswith("Table 7")]
    assert len(cells) == 12
    assert cells.count("matches") == 7
    assert found["section 2.4: volume that onebit saves (%)"].startswith("matches")
