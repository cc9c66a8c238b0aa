"""The next-forward wrapper on an exchange: what it computes is what DistributedDataParallel computes, to the bit."""

import numpy as np
import pytest

import torch_split
from spawn import spawn


@pytest.fixture(scope="module")
def beside_ddp():
    return spawn(3, torch_split.train_beside_ddp)


@pytest.fixture(scope="module")
def by_options():
    return spawn(2, torch_split.train_by_options)


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


def test_weights_and_residuals_are_those_of_ddp_with_the_same_plan(beside_ddp):
    """Of a bucket that travels dense, one by onebit and one by terngrad, whose numbers are drawn at random."""
    for found in beside_ddp:
        assert_same(found["split"]["weights"], found["ddp"]["weights"])
        assert_same(found["split"]["weights"], beside_ddp[0]["split"]["weights"])
        assert_same(found["split"]["owed"], found["ddp"]["owed"])
        assert {name for name, owed in found["split"]["owed"].items() if owed.any()} == {"0.weight", "2.weight"}


def test_traffic_is_reported_as_ddp_does(beside_ddp):
    for found in beside_ddp:
        ours, theirs = found["split"], found["ddp"]
        assert ours["used"] == theirs["used"]
        assert ours["sent"].dense_nbytes == theirs["sent"].dense_nbytes
        assert ours["sent"].sent_nbytes < ours["sent"].dense_nbytes


def test_a_codec_needs_no_plan_and_a_checkpoint_goes_on_where_it_was(by_options):
    for found in by_options:
        assert "by layers: 1 messages by ring+onebit" in found["whole"]["explain"]
        assert_same(found["whole"]["weights"], by_options[0]["whole"]["weights"])
        assert_same(found["resumed"]["weights"], found["whole"]["weights"])
        assert_same(found["resumed"]["owed"], found["whole"]["owed"])


def test_a_planner_profiles_and_plans_as_in_ddp(by_options):
    for found in by_options:
        planned = found["planned"]
        assert planned["plan"].planner == "wfbp"
        assert {bucket.strategy for bucket in planned["plan"].buckets} == {"native"}  # as was asked for
        assert found["automatic"] == {"ring"}  # native would have no second half
        assert [len(bucket.tensors) for bucket in planned["plan"].buckets] == [1, 1, 1, 1]
        assert sum(route.messages for route in planned["routes"]) == len(planned["plan"].messages)
        assert {"compute", "network"} <= planned["lanes"]


def test_each_layer_is_updated_where_its_forward_pass_begins():
    for seen in spawn(2, torch_split.watch_a_forward_pass):
        assert seen == [[place < count for place in range(4)] for count in range(5)]
