"""Optimizers are seen at their first step, and an unsafe codec warns once; "auto" chooses from what is safe for all."""

import warnings

import pytest
import torch

import torch_adam as training
from penstock.exchange.compression import AUTO_CODECS, is_safe_for_adam, make_scheme
from penstock.exchange.parameter_state import Memory
from penstock.torch.watch import OptimizerWatch, is_adaptive
from spawn import spawn


class Elsewhere(torch.optim.Optimizer):
    """Another library's Adam."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "betas": (0.9, 0.99)})

    def step(self):
        """Do nothing."""


def weight() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return parameter


def watch(parameter: torch.nn.Parameter, *codecs: str, memory: Memory | None = None) -> OptimizerWatch:
    return OptimizerWatch([parameter], memory or Memory(), codecs, warns=True)


@pytest.mark.parametrize(
    ("make", "adaptive"),
    [
        (torch.optim.AdamW, True),
        (torch.optim.Adam, True),
        (torch.optim.NAdam, True),
        (torch.optim.RMSprop, True),
        (Elsewhere, True),
        (torch.optim.SGD, False),
    ],
)
def test_optimizers_that_divide_by_gradients_of_before_are_told_from_others(make, adaptive):
    assert is_adaptive(make([weight()])) is adaptive


def test_an_unsafe_codec_with_adam_warns_once_and_names_the_page():
    parameter = weight()
    kept = watch(parameter, "onebit")
    optimizer = torch.optim.AdamW([parameter])
    with pytest.warns(UserWarning, match=r"codec 'onebit' with AdamW.*docs/choosing-a-codec.md"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert kept.adaptive


@pytest.mark.parametrize(("codec", "make"), [("onebit", torch.optim.SGD), ("blocks(bits=4)", torch.optim.AdamW)])
def test_what_is_safe_does_not_warn(codec, make):
    parameter = weight()
    kept = watch(parameter, codec)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make([parameter], lr=0.1).step()
    assert kept.adaptive is not None


def test_what_is_shown_safe_for_adam():
    safe = ("bf16", "fp16", "fp8", "blocks", "blocks(bits=8)", "blocks(bits=4,block=128)", "mine.cll")
    assert all(map(is_safe_for_adam, safe))
    unsafe = ("onebit", "onebit(block=256)", "terngrad(bitwidth=2)", "blocks(bits=2)", "sparse(density=0.01)", "dgc")
    unsafe += ("blocks(block=0)", "blocks(block=256)", "blocks(stochastic=1)", "lowrank(rank=4)")
    assert not any(map(is_safe_for_adam, unsafe))


def test_all_that_auto_considers_is_safe_for_adam():
    assert all(map(is_safe_for_adam, AUTO_CODECS))


def test_auto_chooses_blocks_of_four_bits_with_every_optimizer_where_coarser_is_cheaper():
    wanted = {name: {"blocks(bits=4)"} for name in ("SGD", "AdamW", "CompressedAdamW")}
    for found in spawn(2, training.chosen, list(wanted)):
        assert found == wanted


def test_codecs_that_the_user_named_are_told_from_ours():
    ours, theirs = make_scheme("auto"), make_scheme("auto", candidates=["onebit"])
    assert (ours.named, theirs.named, make_scheme("fp8").named) == ((), ("onebit",), ("fp8",))
