"""The exchanges over all workers at once, against one worker and one tensor at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.bench.convergence import quantised, sparse
from penstock.bench.convergence.method import Method, make_exchange, parse_method
from penstock.bench.convergence.triton_segments import Segments
from penstock.codecs.registry import make_codec
from penstock.errors import PenstockError


def dyadic(workers, numel, seed):
    """Return values whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-512, 513, (workers, numel), generator=generator).float() / 64


def taker(k):
    """Return the oracle of what takes the largest: a stable sort, so that the lower of equal ones is first."""

    def take(values):
        where = values.abs().sort(dim=-1, descending=True, stable=True).indices[..., :k]
        taken = torch.zeros_like(values).scatter_(-1, where, values.gather(-1, where))
        values -= taken
        return taken

    return take


@settings(max_examples=4)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=3), st.integers(1, 40), st.data())
def test_the_largest_are_taken_exactly_even_where_magnitudes_are_equal(sizes, distinct, data):
    k = [data.draw(st.integers(1, size)) for size in sizes]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    values = torch.randint(-distinct, distinct + 1, (2, 3, sum(sizes)), generator=generator) / 8
    rest = values.clone()
    taken = Segments.of(sizes).taker(k)(rest)
    assert torch.equal(taken + rest, values)
    for piece, found, number in zip(values.split(sizes, -1), taken.split(sizes, -1), k, strict=True):
        assert torch.equal(found, taker(number)(piece))


def test_rows_longer_than_a_block_are_summed_up_across_blocks():
    sizes = [5, 5000]
    values = torch.randn((2, 5005), generator=torch.Generator().manual_seed(1))
    segments = Segments.of(sizes)
    for number, piece in enumerate(values.split(sizes, -1)):
        oracle = (piece.clamp(min=0).sum(1), piece.clamp(max=0).sum(1), (piece >= 0).sum(1).float())
        for found, wanted in zip(segments.summary(values), (*oracle, piece.amin(1), piece.amax(1)), strict=True):
            torch.testing.assert_close(found[:, number], wanted)


@pytest.mark.parametrize("growth", [1.0, 0.5, 3.0])
def test_candidates_from_the_last_threshold_give_the_same_and_so_does_a_bound_that_misses(growth):
    """Thresholds that fall or rise too much leave too few or too many candidates; then everything is counted."""
    sizes, k = [300, 5000], [3, 20]
    take = Segments.of(sizes).taker(k)
    for step in range(3):
        values = torch.randn((2, 5300), generator=torch.Generator().manual_seed(step)) * growth**step
        values[:, ::7] = values[:, ::7].sign() * growth**step  # equal ones
        for piece, found, number in zip(values.split(sizes, -1), take(values.clone()).split(sizes, -1), k, strict=True):
            assert torch.equal(found, taker(number)(piece.clone()))


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 40), st.data())
def test_gtopk_loses_nothing_and_applies_at_most_k(workers, numel, data):
    k = data.draw(st.integers(1, numel))
    wanted = dyadic(workers, numel, data.draw(st.integers(0, 99)))
    applied, residuals = sparse.gtopk(wanted.clone(), taker(k))
    assert int((applied != 0).sum()) <= k
    assert torch.equal(applied + residuals.sum(0), wanted.sum(0))


def test_the_published_rule_loses_what_was_dropped_below_a_surviving_index():
    wanted = torch.tensor([[4.0, 0, 0], [0, 5, 0], [6, 0, 0], [0, 0, 1]])
    applied, kept = sparse.gtopk_published(wanted.clone(), taker(1))
    lost = wanted.sum(0) - applied - kept.sum(0)
    assert float(lost.abs().sum()) > 0
    ours, residuals = sparse.gtopk(wanted.clone(), taker(1))
    assert torch.equal(ours, applied)
    assert torch.equal(ours + residuals.sum(0), wanted.sum(0))


@given(st.sampled_from([1, 2, 3, 4]), st.integers(1, 30), st.data())
def test_topk_sends_everybodys_largest(workers, numel, data):
    k = data.draw(st.integers(1, numel))
    wanted = dyadic(workers, numel, data.draw(st.integers(0, 99)))
    applied, residuals = sparse.topk(wanted.clone(), taker(k))
    assert torch.equal(applied + residuals.sum(0), wanted.sum(0))
    for row, kept in zip(wanted, residuals, strict=True):
        sent = row - kept
        assert int((sent != 0).sum()) <= k
        assert float(kept.abs().max()) <= float(row.abs().sort(descending=True).values[k - 1])


@pytest.mark.parametrize("kind", ["topk", "gtopk", "gtopk-published", "onebit", "dgc"])
def test_runs_that_exchange_together_do_not_see_each_other(kind):
    wanted = torch.stack([dyadic(4, 30, seed) for seed in (1, 2)])
    exchange = make_exchange(Method(kind, 0.2 if kind != "onebit" else 0.0), 0.2, Segments.of([20, 10]))
    together = exchange(wanted.clone())
    for run in (0, 1):
        alone = exchange(wanted[run : run + 1].clone())
        assert all(torch.equal(both[run], one[0]) for both, one in zip(together, alone, strict=True))


def test_small_tensors_travel_dense_and_count_in_nobodys_k():
    wanted = torch.tensor([[[1.0, 2, 3, 4, 9, 8], [5.0, 4, 3, 2, 7, 6]]])
    exchange = make_exchange(Method("topk", 0.25, dense_below=3), 0.25, Segments.of([4, 2]))
    applied, residuals = exchange(wanted)
    assert applied.tolist() == [[5, 0, 0, 4, 16, 14]]
    assert residuals.tolist() == [[[1, 2, 3, 0, 0, 0], [0, 4, 3, 2, 0, 0]]]


@pytest.mark.parametrize("kind", ["topk", "gtopk", "onebit", "terngrad", "dgc"])
def test_small_tensors_leave_no_residual_by_any_method(kind):
    wanted = dyadic(4, 30, 5)[None]
    exchange = make_exchange(Method(kind, 0.1, dense_below=5), 0.1, Segments.of([20, 6, 4]))
    applied, residuals = exchange(wanted.clone())
    assert torch.equal(applied[0, 26:], wanted[0, :, 26:].sum(0))
    assert not residuals[..., 26:].any()
    torch.testing.assert_close(applied + residuals.sum(1), wanted.sum(1), rtol=1e-5, atol=1e-4)


def decoded(name, values):
    codec = make_codec(name)
    out = np.zeros(codec.max_nbytes(values.size), np.uint8)
    nbytes = codec.encode(values, None, out)
    back = np.zeros_like(values)
    codec.decode(out[:nbytes], back)
    return back


def served(wanted, sizes, encoded):
    """Return what is applied and kept where tensor t is summed by worker t mod P: one tensor and worker at a time."""
    applied, kept = torch.zeros_like(wanted[0]), wanted.clone()
    for number, place in enumerate(torch.arange(sum(sizes)).split(sizes)):
        server, total = number % len(wanted), wanted[number % len(wanted), place].clone()
        for worker in set(range(len(wanted))) - {server}:
            sent = encoded(wanted[worker, place])
            kept[worker, place] -= sent
            total += sent
        applied[place] = encoded(total)
        kept[server, place] = total - applied[place]
    return applied, kept


@pytest.mark.parametrize("sizes", [[5], [64, 7, 1], [33, 9, 2, 1]])
@pytest.mark.parametrize("workers", [1, 3, 4])
def test_onebit_through_servers_is_the_codec_tensor_by_tensor(sizes, workers):
    wanted = dyadic(workers, sum(sizes), 1)
    oracle = served(wanted, sizes, lambda piece: torch.from_numpy(decoded("onebit", piece.numpy().copy())))
    applied, residuals = quantised.onebit(wanted[None], Segments.of(sizes))
    torch.testing.assert_close(applied[0], oracle[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(residuals[0], oracle[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [[400], [300, 100]])
def test_dgc_through_servers_is_what_topk_keeps_tensor_by_tensor(sizes):
    wanted = dyadic(2, sum(sizes), 3)
    oracle = served(wanted, sizes, lambda piece: torch.from_numpy(decoded("topk(density=0.01)", piece.numpy().copy())))
    applied, residuals = quantised.largest(Segments.of(sizes), 0.01)(wanted[None].clone())
    assert torch.equal(applied[0], oracle[0])
    assert torch.equal(residuals[0], oracle[1])


def test_terngrad_takes_levels_between_the_extremes_and_is_right_on_average():
    values = torch.linspace(-1, 1, 101)
    torch.manual_seed(5)
    applied, residuals = quantised.terngrad(values.repeat(120, 1, 1), Segments.of([101]))  # one worker: the server
    levels = torch.tensor([-1, -1 / 3, 1 / 3, 1])
    assert float((applied[..., None] - levels).abs().min(-1).values.max()) < 1e-6
    assert float((applied.mean(0) - values).abs().max()) < 0.15
    torch.testing.assert_close(applied + residuals[:, 0], values.expand_as(applied))


def test_equal_values_survive_terngrad():
    applied, residuals = quantised.terngrad(torch.full((1, 2, 8), 3.0), Segments.of([8]))
    assert applied.tolist() == [[6.0] * 8]
    assert not residuals.any()


@settings(max_examples=8)
@given(
    st.sampled_from([quantised.onebit, quantised.terngrad]), st.sampled_from([1, 2, 3, 5]),
    st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 99),
)  # fmt: skip
def test_servers_apply_and_keep_everything(exchange, workers, sizes, seed):
    wanted = torch.stack([dyadic(workers, sum(sizes), seed), dyadic(workers, sum(sizes), seed + 1)])
    applied, residuals = exchange(wanted.clone(), Segments.of(sizes))
    torch.testing.assert_close(applied + residuals.sum(1), wanted.sum(1), rtol=1e-5, atol=1e-4)


def test_density_warms_up_and_then_stays():
    stages = range(6)
    assert [Method("gtopk", 0.005).density_at(stage) for stage in stages] == [0.25, 0.0725, 0.015, 0.005, 0.005, 0.005]
    assert [Method("dense").density_at(stage) for stage in stages] == [1.0] * 6
    assert [Method("onebit").density_at(stage) for stage in stages] == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]


def test_methods_are_written_as_kind_density_and_options():
    assert parse_method("gtopk:0.001") == Method("gtopk", 0.001)
    assert parse_method("terngrad:nofeedback").name == "terngrad, no feedback"
    assert parse_method("dgc:0.001:corrected:rate=0.5") == Method("dgc", 0.001, corrected=True, rate=0.5)
    with pytest.raises(PenstockError, match="no method 'best'; wanted dense, dgc, topk"):
        parse_method("best")
