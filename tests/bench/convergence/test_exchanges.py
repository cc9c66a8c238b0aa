"""The exchanges over all workers at once, against one worker and one tensor at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.convergence import quantised, sparse
from penstock.bench.convergence.method import Method, parse_method
from penstock.bench.convergence.quantised import Parts
from penstock.codecs.registry import make_codec
from penstock.errors import PenstockError


def dyadic(workers, numel, seed):
    """Return values whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-512, 513, (workers, numel), generator=generator).float() / 64


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 40), st.data())
def test_gtopk_loses_nothing_and_applies_at_most_k(workers, numel, data):
    k = data.draw(st.integers(1, numel))
    wanted = dyadic(workers, numel, data.draw(st.integers(0, 99)))
    applied, residuals = sparse.gtopk(wanted, k)
    assert int((applied != 0).sum()) <= k
    assert torch.equal(applied + residuals.sum(0), wanted.sum(0))


def test_the_published_rule_loses_what_was_dropped_below_a_surviving_index():
    wanted = torch.tensor([[4.0, 0, 0], [0, 5, 0], [6, 0, 0], [0, 0, 1]])
    applied, kept = sparse.gtopk_published(wanted, 1)
    lost = wanted.sum(0) - applied - kept.sum(0)
    assert float(lost.abs().sum()) > 0
    ours, residuals = sparse.gtopk(wanted, 1)
    assert torch.equal(ours, applied)
    assert torch.equal(ours + residuals.sum(0), wanted.sum(0))


@given(st.sampled_from([1, 2, 3, 4]), st.integers(1, 30), st.data())
def test_topk_sends_everybodys_largest(workers, numel, data):
    k = data.draw(st.integers(1, numel))
    wanted = dyadic(workers, numel, data.draw(st.integers(0, 99)))
    applied, residuals = sparse.topk(wanted, k)
    assert torch.equal(applied + residuals.sum(0), wanted.sum(0))
    for row, kept in zip(wanted, residuals, strict=True):
        sent = row - kept
        assert int((sent != 0).sum()) <= k
        assert float(kept.abs().max()) <= float(row.abs().sort(descending=True).values[k - 1])


def decoded(name, values):
    codec = make_codec(name)
    out = np.zeros(codec.max_nbytes(values.size), np.uint8)
    nbytes = codec.encode(values, None, out)
    back = np.zeros_like(values)
    codec.decode(out[:nbytes], back)
    return back


@pytest.mark.parametrize("sizes", [[5], [1, 7, 64], [33, 2, 9, 1]])
def test_onebit_is_what_the_codec_decodes_tensor_by_tensor(sizes):
    values = dyadic(3, sum(sizes), 1)
    ours = quantised.onebit(values, Parts.of(sizes))
    for row, found in zip(values, ours, strict=True):
        for piece, back in zip(row.split(sizes), found.split(sizes), strict=True):
            np.testing.assert_allclose(back.numpy(), decoded("onebit", piece.numpy().copy()), rtol=1e-6)


@pytest.mark.parametrize("sizes", [[400], [100, 300]])
def test_the_largest_of_each_tensor_are_what_topk_keeps(sizes):
    values = torch.randn((2, sum(sizes)), generator=torch.Generator().manual_seed(3))
    ours = quantised.largest(values, Parts.of(sizes), 0.01)
    for row, found in zip(values, ours, strict=True):
        for piece, back in zip(row.split(sizes), found.split(sizes), strict=True):
            np.testing.assert_array_equal(back.numpy(), decoded("topk(density=0.01)", piece.numpy().copy()))


def test_terngrad_takes_levels_between_the_extremes_and_is_right_on_average():
    values = torch.linspace(-1, 1, 101).repeat(4000, 1)
    generator = torch.Generator().manual_seed(5)
    rounded = quantised.terngrad(values, Parts.of([101]), generator)
    levels = torch.tensor([-1, -1 / 3, 1 / 3, 1])
    assert float((rounded[..., None] - levels).abs().min(-1).values.max()) < 1e-6
    assert float((rounded.mean(0) - values[0]).abs().max()) < 0.03


def test_equal_values_survive_terngrad():
    values = torch.full((2, 8), 3.0)
    assert torch.equal(quantised.terngrad(values, Parts.of([8])), values)


@given(st.sampled_from([1, 2, 3, 5]), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 99))
def test_servers_apply_and_keep_everything(workers, sizes, seed):
    wanted = dyadic(workers, sum(sizes), seed)
    applied, residuals = quantised.exchange(wanted, quantised.onebit, Parts.of(sizes))
    torch.testing.assert_close(applied + residuals.sum(0), wanted.sum(0), rtol=1e-5, atol=1e-4)


def test_density_warms_up_and_then_stays():
    assert Method("gtopk", 0.005).densities(6) == [0.25, 0.0725, 0.015, 0.005, 0.005, 0.005]
    assert Method("gtopk", 0.001).densities(2) == [0.25, 0.0725]
    assert Method("dense").densities(2) == [1.0, 1.0]
    assert Method("onebit").densities(6) == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]


def test_methods_are_written_as_kind_and_density():
    assert parse_method("gtopk:0.001") == Method("gtopk", 0.001)
    assert parse_method("terngrad:nofeedback").name == "terngrad, no feedback"
    with pytest.raises(PenstockError, match="no method 'best'; wanted dense, dgc, topk"):
        parse_method("best")
