"""Our wrapper against torch's: the same results, whatever torch's can do, and all ranks alike to the bit."""

import re

import numpy as np
import pytest

import torch_training as training
from spawn import spawn, spawn_outcomes

PLANNERS = ["naive", "wfbp", "single", "threshold", "greedy", "exact", "selective", "joint"]
STRATEGIES = ["ring", "recursive_doubling", "linear_pipeline"]
CASES = {
    **{f"planner {name}": {"ours": {"planner": name, "strategy": "native", "bulk": False}} for name in PLANNERS},
    **{f"strategy {name}": {"ours": {"planner": "wfbp", "strategy": name, "bulk": False}} for name in STRATEGIES},
    "bulks": {"ours": {"planner": "wfbp", "strategy": "ring"}},
    "unused parameters": {"model": "branches", "torch": {"find_unused_parameters": True}},
    "tied weights": {"model": "tied"},
    "frozen parameters": {"model": "frozen"},
    "buffers": {"model": "normalised"},
    "buffers of its own": {"model": "normalised", "torch": {"broadcast_buffers": False}},
    "bucket views": {"torch": {"gradient_as_bucket_view": True}},
    "static graph": {"torch": {"static_graph": True}},
    "several types": {"model": "mixed"},
    "gradient accumulation": {"accumulate": 3},
    "gradient clipping": {"clip": True},
    "autocast": {"autocast": True},
    "torch.compile": {"compiled": True},
    "evaluation with gradients": {"evaluates": (0, 1)},
    "evaluation with gradients on one rank": {"evaluates": (0,), "ours": {"strategy": "ring"}},
    "evaluation and unused parameters": {
        "evaluates": (1,),
        "model": "branches",
        "torch": {"find_unused_parameters": True},
    },
}


@pytest.fixture(scope="module")
def two_ranks():
    """All cases on two ranks, in one pair of processes."""
    return spawn(2, training.compare, CASES)


def check_same(theirs, ours):
    """Equal to torch's within float32 summation error, and bit-identical across ranks, running averages excepted."""
    for name, value in ours[0]["state"].items():
        np.testing.assert_allclose(value, theirs[0]["state"][name], rtol=2e-5, atol=2e-6)
        if "running" not in name and "tracked" not in name:
            for other in ours[1:]:
                np.testing.assert_array_equal(value, other["state"][name])


@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_torch_does(two_ranks, case):
    theirs, ours = zip(*(rank[case] for rank in two_ranks), strict=True)
    check_same(theirs, ours)
    if case != "several types":
        assert ours[0]["plan"].hash == ours[1]["plan"].hash


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_planner_asked_for_planned(two_ranks, planner):
    assert two_ranks[0][f"planner {planner}"][1]["plan"].planner == planner


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_strategy_asked_for_carries_the_buckets(two_ranks, strategy):
    plan = two_ranks[0][f"strategy {strategy}"][1]["plan"]
    assert {bucket.strategy for bucket in plan.buckets} == {strategy}


def test_parameters_of_several_types_keep_torchs_buckets_and_say_so(two_ranks):
    explained = two_ranks[0]["several types"][1]["explain"]
    assert explained.startswith("torch's own buckets are kept: its parameters have several types")


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_any_world_size(world_size):
    ranks = spawn(world_size, training.compare, {"ring": {"ours": {"strategy": "ring"}}})
    check_same(*zip(*(rank["ring"] for rank in ranks), strict=True))


def test_torchs_own_wrapper_takes_our_hook():
    check_same(spawn(2, training.train_without_hook), spawn(2, training.train_with_bare_hook))


def test_uneven_inputs_join_as_with_torch():
    options = {"network": training.NETWORK, "profile_iterations": 2, "strategy": "native"}
    theirs = spawn(2, training.train_uneven, False, {})
    ours = spawn(2, training.train_uneven, True, options)
    check_same(theirs, ours)


def test_buckets_follow_the_plan_from_the_second_iteration_after_it_is_made():
    *seen, planned = spawn(2, training.follow_buckets, "wfbp", False)[0]
    assert seen[-1] == planned
    assert len(planned) == 6  # three layers, weight and bias each
    assert sum(seen[0]) == sum(planned)


def test_buckets_of_a_bulk_are_one_for_torch():
    *seen, planned = spawn(2, training.follow_buckets, "wfbp", True)[0]
    assert seen[-1] == [sum(planned)]
    assert len(planned) == 6


def test_the_network_is_measured_where_none_is_given():
    ours = [
        rank["case"][1] for rank in spawn(2, training.compare, {"case": {"ours": {"network": None}, "iterations": 4}})
    ]
    assert re.search("(other planners would take|planners compared without that): .*naive", ours[0]["explain"])
    assert "predicted iteration" in ours[0]["explain"]
    assert "measured iteration" in ours[0]["explain"]


def test_a_network_that_cannot_be_measured_does_not_stop_training():
    ours = spawn(2, training.train_without_a_measurable_network)
    check_same(spawn(2, training.train_without_hook), ours)
    assert ours[0]["explain"].startswith(
        "torch's own buckets are kept: the network could not be measured (point-to-point"
    )


def test_copies_and_pickles_keep_the_plan():
    hashes = spawn(2, training.copy_and_pickle)
    assert len({each for rank in hashes for each in rank}) == 1


def test_what_ranks_are_given_is_compared_and_all_of_them_say_what_is_wrong():
    first, second = spawn(2, training.different_plans)
    assert first == second
    different, missing, another, network, *options = first
    assert different.startswith("PlanError: ranks are given different things (rank 0 plan ")
    same = "; give all ranks the same"
    assert different.endswith(same)
    assert missing == f"PlanError: ranks are given different things (rank 0 a network, rank 1 nothing){same}"
    assert another == (
        "PlanError: on rank 1, the plan holds 'head.bias', and the model trains 'weight' and 1 more; "
        "wanted one of this model"
    )
    assert network.startswith("PlanError: network 'network' has 64 workers and this group 2; measure it with as many")
    assert options == [
        f"PlanError: codec is None on rank 0 and 'onebit' on rank 1{same}",
        "PlanError: warmup is (0.25, 0.0725, 0.015, 0.004, 0.001) on rank 0 and "
        f"(0.25, 0.0625, 0.015625, 0.00390625, 0.001) on rank 1{same}",
        f"PlanError: profile_iterations is 5 on rank 0 and 6 on rank 1{same}",
        f"PlanError: clip is 1.0 on rank 0 and 2.0 on rank 1{same}",
    ]


def test_a_wrapper_that_is_dropped_leaves_no_thread_and_no_hook():
    assert spawn(1, training.drop_wrappers) == [([], 0)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"planner": "best"}, "no planner called 'best'"),
        ({"strategy": "rong"}, "no all-reduce strategy called 'rong'; wanted one of auto, ring"),
        ({"codec": "twobit"}, "codec 'twobit'; wanted one of 3lc"),
        ({"codec": "twobit"}, r"terngrad\(bitwidth, block\), .*gtopk\(density, value_bits\), .*, auto, or a path"),
        ({"codec": "onebit", "strategy": "native"}, "codec 'onebit' with strategy 'native': the engine compresses"),
        ({"codec": "onebit", "strategy": "gtopk"}, "strategy 'gtopk' merges sparse blocks; codec 'onebit' makes none"),
        ({"codec": "onebit", "density": 0.1}, "density or warmup with codec 'onebit'; wanted one of gtopk, topk"),
        ({"codec": "gtopk", "density": 2.0}, "density 2; wanted more than 0"),
        ({"codec": "gtopk", "warmup": "fast"}, "warm-up 'fast'; wanted paper or dgc"),
        ({"codec": "gtopk", "warmup": "dgc", "warmup_every": 0}, "warmup_every is 0; wanted at least 1"),
        ({"momentum": 1.0}, "momentum 1.0; wanted 0 or more and less than 1"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite is 'ignore'; wanted one of raise, skip"),
        ({"replan_drift": -1.0}, "replan_drift is -1.0; wanted 0"),
        ({"profile_iterations": 1}, "profile_iterations is 1; wanted a whole number, at least 2"),
        ({"profile_iterations": "5"}, "profile_iterations is '5'; wanted a whole number"),
        ({"measure_seconds": 0}, "measure_seconds is 0; wanted a number of seconds, more than 0"),
        ({"measurements": True}, "measurements is True; wanted a folder, None for the cache folder, or False"),
        ({"replan_drift": None}, "replan_drift is None; wanted 0"),
        ({"plan": 5}, "plan is 5; wanted a Plan, the path of a file, or None"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(options, message):
    with pytest.raises(Exception, match=message):
        spawn(1, training.compare, {"case": {"ours": options}})


def test_a_rank_that_dies_is_named_on_the_others_and_nothing_hangs():
    survivor, dead = spawn_outcomes(2, training.lose_a_rank)
    assert dead.exit_code == 7
    during, afterwards = survivor.value.split(" | ")
    assert during.startswith("TransportError: ")
    assert "ring" in during
    assert "rank 1" in during
    assert afterwards == during
    assert survivor.exit_code == 0  # the process ends by itself: no thread holds it
