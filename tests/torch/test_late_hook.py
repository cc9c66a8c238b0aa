"""`comm_hook` made before the process group does what one made after it does; by default it compresses nothing."""

import numpy as np
import pytest

from integration_workers import hook_before_group, hook_by_default
from penstock.errors import PlanError
from penstock.torch import comm_hook
from spawn import spawn


def test_a_hook_made_before_the_process_group_trains_to_the_same_bits():
    for found in spawn(2, hook_before_group, "blocks(bits=4)"):
        assert found["late"]
        np.testing.assert_array_equal(*found["weights"])
        assert found["sent"][0] == found["sent"][1] > 0
        assert found["residuals"] == [True, True]


def test_without_a_strategy_and_a_codec_the_engine_sums_buckets_as_without_a_hook():
    for found in spawn(2, hook_by_default):
        np.testing.assert_array_equal(*found["weights"])
        assert found["routes"] == ["native"]


def test_its_state_before_the_first_bucket_is_refused_with_what_to_do():
    sender, _ = comm_hook("ring", "onebit")
    with pytest.raises(PlanError, match="ask it after the first backward pass"):
        sender.exchange_state_dict()


def test_bad_names_are_refused_when_the_hook_is_made():
    with pytest.raises(PlanError, match="no all-reduce strategy called 'rings'"):
        comm_hook("rings")
