"""Local aggregation in the wrapper: nodes are found, and chosen where that is predicted to be faster."""

import pytest

import torch_hosts as training
from spawn import spawn
from torch_conserved import EXACT, check_conserved, gradients

STEPS, RANKS = 4, len(training.HERE)
LEADERS = [True, True, False]
CASES = {
    "asked for": {"codec": EXACT, "strategy": "hierarchical", "network": training.network(EXACT, 1.0, 1.0)},
    "it is faster": {"codec": EXACT, "network": training.network(EXACT, 1e-2, 1e-3)},
    "whether to compress": {
        "codec": "auto",
        "candidates": ["onebit"],
        "network": training.network("onebit", 1e-2, 1e-3),
    },
}


@pytest.fixture(scope="module")
def ranks():
    """All cases on three ranks, in one group of processes."""
    return spawn(RANKS, training.on_hosts, CASES)


def strategies(rank, case):
    return {bucket.strategy for bucket in rank["cases"][case]["plan"].buckets}


def test_all_ranks_find_who_shares_a_host(ranks):
    assert [rank["nodes"] for rank in ranks] == [((0, 2), (1,))] * RANKS
    assert all(rank["files"] == 2 for rank in ranks)


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_lost_and_ranks_are_alike(ranks, case):
    check_conserved(
        [rank["cases"][case] for rank in ranks], gradients(RANKS, STEPS), tolerance=1e-4
    )  # thirds are rounded


@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        ("asked for", "hierarchical"),
        ("it is faster", training.LOCAL),
        ("whether to compress", training.LOCAL),
    ],
)
def test_it_is_chosen_by_predicted_time(ranks, case, strategy):
    assert [strategies(rank, case) for rank in ranks] == [{strategy}] * RANKS
    explained = ranks[0]["cases"][case]["explain"]
    note = "3 ranks on 2 hosts (0, 2; 1): summing inside hosts first was measured too, as hierarchical"
    assert (note in explained) == (case != "asked for")


@pytest.mark.parametrize("case", ["asked for", "it is faster", "whether to compress"])
def test_only_the_first_rank_of_a_host_owes_anything(ranks, case):
    assert [bool(rank["cases"][case]["owed"].any()) for rank in ranks] == LEADERS
