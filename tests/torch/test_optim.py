"""AdamW with compressed momentum: torch's own without a codec, all ranks alike with one, and resumable to the bit."""

import copy
import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import torch_adam as training
from penstock.torch.optim import LIMIT, CompressedAdamW, Moments, _bound, _flat, _with_floor
from spawn import spawn

STEPS = 40
CODED = {
    "onebit": {"codec": "onebit(block=64)"},
    "clipped": {"codec": "onebit(block=64)", "max_norm": 0.5, "clip": 1.0},
    "small tensors dense": {"codec": "onebit(block=64)", "dense_below": 100, "warmup_codec": None},
    "two passes": {"codec": "blocks(bits=8)", "passes": 2},
    "made while frozen": {"codec": "onebit(block=64)", "frozen": True},
}
CASES = {
    "torch": {"codec": None, "optimizer": "torch"},
    "no codec": {"codec": None},
    "blocks": {"codec": "blocks(bits=8)"},
} | CODED


@pytest.fixture(scope="module")
def two_ranks():
    """All cases on two ranks, in one pair of processes."""
    return spawn(2, training.runs, CASES, STEPS)


def test_without_a_codec_it_is_torchs_adamw_to_the_bit(two_ranks):
    np.testing.assert_array_equal(two_ranks[0]["no codec"]["weights"], two_ranks[0]["torch"]["weights"])


@pytest.mark.parametrize("case", CODED)
def test_ranks_end_with_the_same_bits_and_less_loss(two_ranks, case):
    np.testing.assert_array_equal(two_ranks[0][case]["weights"], two_ranks[1][case]["weights"])
    losses = two_ranks[0][case]["losses"]
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])


def test_momentum_in_one_bit_sends_less_than_momentum_in_eight(two_ranks):
    one, eight = (two_ranks[0][case]["traffic"].sent_nbytes for case in ("onebit", "blocks"))
    assert one < 0.6 * eight  # small tensors: headers weigh a lot


@pytest.mark.parametrize("passes", [1, 2])
def test_a_momentum_step_is_adamws_with_the_second_moment_of_the_warm_up(passes):
    """Computed anew with numpy from both ranks' bounded gradients; the codec's eight bits lose next to nothing.

    In two passes, the first inside of `no_sync`, gradients are those of one.
    """
    found = spawn(2, training.one_momentum_step, passes)
    for name, step in found[0].items():
        root = np.sqrt(step["second moment"]) + 1e-8
        bound = LIMIT * 2**0.5 * root
        gradient = np.mean([np.clip(rank[name]["gradient"], -bound, bound) for rank in found], axis=0)
        beta1 = step["beta1"]
        momentum = beta1 * step["momentum"] + (1 - beta1) * gradient
        rate, number = 0.01, training.WARMUP + 1
        wanted = step["before"] * (1 - rate * step["decay"]) - rate / (1 - beta1**number) * momentum / root
        scale = np.abs(momentum / root).max() * rate
        np.testing.assert_allclose(step["after"], wanted, atol=0.02 * scale)


def test_a_gradient_a_million_times_as_large_moves_no_weight_further_than_its_bound():
    for step in spawn(2, training.one_momentum_step, 1, 1e6)[0].values():
        beta1, rate, number = step["beta1"], 0.01, training.WARMUP + 1
        root = np.sqrt(step["second moment"]) + 1e-8
        largest = beta1 * np.abs(step["momentum"] / root) + (1 - beta1) * LIMIT * 2**0.5
        moved = np.abs(step["after"] - step["before"] * (1 - rate * step["decay"])) * (1 - beta1**number) / rate
        assert (moved <= largest + 0.02 * largest.max()).all()


def test_gradients_that_are_clipped_while_warming_up_count_as_they_came():
    plain, clipped = spawn(2, training.mean_squares, [0.0, 1e-3])[0]
    for one, other in zip(plain, clipped, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-3)


def test_a_bound_leaves_small_values_alone_and_does_not_hide_what_is_not_finite():
    values = torch.tensor([0.5, -2.0, 3.0, -50.0, torch.inf, torch.nan])
    _bound([values], 3.0)
    assert torch.equal(values[:4], torch.tensor([0.5, -2.0, 3.0, -3.0]))
    assert values[4:].isnan().all()


@pytest.mark.parametrize("at", [3, training.WARMUP, 9])
def test_a_run_resumed_from_a_checkpoint_ends_with_the_same_bits(at):
    for through, resumed in spawn(2, training.resumed, "onebit(block=64)", at, 12):
        np.testing.assert_array_equal(through, resumed)


def test_wrong_uses_are_refused_in_a_sentence():
    wanted = [
        "warmup_steps is None; wanted 2 or more",
        "which sends few entries; wanted onebit or blocks",
        "wanted one of",
        "CompressedAdamW with amsgrad=True and a codec",
        "max_norm is -1.0; wanted more than 0",
        "CompressedAdamW does not have parameter '0.bias'",
        "two synchronised backward passes before a step",
    ]
    said = spawn(2, training.refused)[0]
    assert len(said) == len(wanted)
    for text, expected in zip(said, wanted, strict=True):
        assert expected in text


def test_alone_it_takes_torchs_checkpoints_and_gives_them():
    torch.manual_seed(0)
    first = torch.nn.Linear(5, 3)
    second = copy.deepcopy(first)
    optimizers = [torch.optim.AdamW(first.parameters()), CompressedAdamW(second.parameters())]
    for step in range(6):
        if step == 3:
            file = io.BytesIO()
            torch.save(optimizers[0].state_dict(), file)
            file.seek(0)
            optimizers[1].load_state_dict(torch.load(file))
        for model, optimizer in zip((first, second), optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(2, 5) * step).square().sum().backward()
            optimizer.step()
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_frozen_second_moment_is_at_least_a_hundredth_of_its_blocks_mean():
    squares = torch.zeros(300)
    squares[:256], squares[256:] = 1.0, 2.0
    squares[[3, 270]] = 0.0
    found = _with_floor(squares)
    assert found[3] == pytest.approx(0.01 * 255 / 256)
    assert found[270] == pytest.approx(0.01 * 2 * 43 / 44)
    assert torch.equal(found[:3], squares[:3])


def test_a_norm_is_shared_by_size_where_all_second_moments_are_zero():
    small, large = torch.zeros(1), torch.zeros(3)
    moments = object.__new__(Moments)
    moments._parameters, moments._max_norm = {"small": small, "large": large}, 2.0
    moments._optimizer = SimpleNamespace(
        state={each: {"exp_avg_sq": torch.zeros_like(each)} for each in (small, large)}
    )
    shares = moments._shares()
    assert (float(shares[small]), float(shares[large])) == pytest.approx((1.0, 3**0.5))


def test_flat_memory_of_a_channels_last_tensor_is_in_its_own_order():
    tensor = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    assert torch.equal(_flat(tensor), tensor.permute(0, 2, 3, 1).reshape(-1))
