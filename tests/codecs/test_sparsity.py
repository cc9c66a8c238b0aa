"""What is exchanged sparsely and what waits; residuals of a changed world size."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.codecs.sparsity import put_off, redistribute, sparse_runs
from penstock.errors import CodecError
from sparse_oracle import dyadic


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(0, 60), st.sampled_from(["tensor", "bucket", "model"]))
def test_runs_cover_the_bucket_and_separate_small_tensors(numels, dense_below, granularity):
    runs = sparse_runs(numels, granularity, dense_below)
    assert [run.start for run in runs] == [0, *(run.stop for run in runs[:-1])][: len(runs)]
    assert (runs[-1].stop if runs else 0) == sum(numels)
    assert all(one.sparse != other.sparse for one, other in pairwise(runs))
    assert sum(run.stop - run.start for run in runs if run.sparse) == sum(n for n in numels if n >= dense_below)
    assert all(run.parts[0] == 0 and run.parts[-1] == run.stop - run.start for run in runs)
    if granularity == "tensor":
        assert sum(len(run.parts) - 1 for run in runs if run.sparse) == sum(n >= dense_below for n in numels)
    else:
        assert all(len(run.parts) == 2 for run in runs)


def test_an_unknown_granularity_is_refused():
    with pytest.raises(CodecError, match="selection per 'layer'; wanted one of tensor, bucket, model"):
        sparse_runs([1], "layer")


def test_gradients_that_are_put_off_are_in_the_residual():
    residual = np.ones(3, np.float32)
    put_off(residual, np.arange(3, dtype=np.float32))
    assert residual.tolist() == [1, 2, 3]


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 99))
def test_what_is_owed_to_the_mean_stays_the_same_whatever_the_world_size(old, new, seed):
    rng = np.random.default_rng(seed)
    before = [{"w": dyadic(rng, 20), "b": dyadic(rng, (2, 3))} for _ in range(old)]
    after = redistribute(before, new)
    assert len(after) == new
    for name in ("w", "b"):
        owed = np.sum([one[name] for one in before], axis=0, dtype=np.float64) / old
        found = np.sum([one[name] for one in after], axis=0, dtype=np.float64) / new
        np.testing.assert_allclose(found, owed, rtol=1e-6, atol=1e-6)
        assert after[0][name].dtype == np.float32


@given(st.sampled_from([(1, 2), (2, 4), (4, 4), (3, 3), (4, 2), (8, 1)]), st.integers(0, 99))
def test_ratios_that_are_powers_of_two_lose_no_bit(sizes, seed):
    old, new = sizes
    before = [{"w": dyadic(np.random.default_rng((seed, rank)), 20)} for rank in range(old)]
    after = redistribute(before, new)
    owed, found = (np.sum([one["w"] for one in states], axis=0, dtype=np.float64) for states in (before, after))
    assert np.array_equal(found * old, owed * new)


def test_the_same_world_size_gets_its_own_back_in_fresh_memory():
    before = [{"w": np.full(2, rank, np.float32)} for rank in range(3)]
    after = redistribute(before, 3)
    assert [one["w"].tolist() for one in after] == [[0, 0], [1, 1], [2, 2]]
    assert after[0]["w"] is not before[0]["w"]


def test_states_that_do_not_belong_together_are_refused():
    with pytest.raises(CodecError, match="residuals of ranks 0 and 1 differ in 'b'; load those of one checkpoint"):
        redistribute([{"w": np.zeros(1, np.float32)}, {"b": np.zeros(1, np.float32), "w": np.zeros(1, np.float32)}], 2)
    with pytest.raises(CodecError, match="residuals of 0 ranks for 2; wanted at least 1 of each"):
        redistribute([], 2)
