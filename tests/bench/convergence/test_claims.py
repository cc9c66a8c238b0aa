"""What a study was asked to show, from rows with known ends."""

from dataclasses import asdict

import pytest

from penstock.bench.convergence.claims import claims


def rows(better, ends):
    same = {"task": "line", "workers": 4, "global_batch": 8, "steps": 10, "metric_name": "m", "learning_rate": 1.0}
    return [same | {"better": better, "method": method, "final": end} for method, end in ends.items()]


@pytest.mark.parametrize(("better", "sign"), [("higher", -1), ("lower", 1)])
def test_one_per_cent_behind_dense_is_near_enough(better, sign):
    ends = {"dense": 1.0, "gtopk 0.1": 1 + 0.009 * sign, "onebit": 1 + 0.02 * sign, "topk 0.1": 1 + 0.5 * sign}
    found = {claim.text: claim.holds for claim in claims(rows(better, ends))}
    assert found == {"gtopk 0.1, 4 workers, behind dense": True, "onebit, 4 workers, behind dense": False}


@pytest.mark.parametrize(("better", "ahead"), [("higher", 1.25), ("lower", 0.8)])
def test_gtopk_is_compared_with_the_published_rule_of_its_density(better, ahead):
    ends = {"dense": 1.0, "gtopk 0.1": 0.8, "gtopk-published 0.1": 1.0, "gtopk-published 0.2": 2.0}
    (claim,) = [claim for claim in claims(rows(better, ends)) if "published" in claim.text]
    assert asdict(claim) == {
        "text": "gtopk 0.1, 4 workers, over gtopk-published", "value": 1 / ahead, "wanted": 1.0, "at_most": False
    }  # fmt: skip
    assert claim.holds == (better == "lower")


def test_runs_that_diverged_are_no_claims():
    assert claims(rows("lower", {"dense": 1.0, "gtopk 0.1": None})) == []
