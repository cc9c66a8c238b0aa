"""A step that is put off has the settings of its moment; what a scheduler set since then stays."""

import pytest
import torch

from adaptor.worlds import run_worlds
from penstock.errors import NonFiniteError
from penstock.torch.layered import Split, settings_of, step_with


def test_a_step_has_the_learning_rate_of_its_moment():
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    then = settings_of(optimizer)
    optimizer.param_groups[0]["lr"] = 0.25
    weight.grad = torch.tensor([1.0])
    step_with(optimizer, then)
    assert weight.tolist() == [0.5]
    assert optimizer.param_groups[0]["lr"] == 0.25


class Counting(torch.optim.SGD):
    """Keeps what it found out in the settings, as some optimizers do."""

    def step(self):
        self.param_groups[0]["found"] += 1


def test_what_the_optimizer_itself_notes_is_kept():
    optimizer = Counting([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    optimizer.param_groups[0]["found"] = 0
    step_with(optimizer, settings_of(optimizer))
    assert optimizer.param_groups[0]["found"] == 1


def test_after_nan_a_split_wrapper_can_be_finished_so_that_a_state_can_be_loaded():
    def rank(world):
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        split = Split(module, lambda parameters: torch.optim.SGD(parameters, lr=0.1), world, "", 5, {"codec": "onebit"})
        split.least_nbytes = 0  # two layers
        split.begin()
        before = split.session.state_dict()

        def train(value):
            split.begin_forward()
            module(torch.full((3, 4), value)).sum().backward()
            split.step()
            split.finish()

        with pytest.raises(NonFiniteError):
            train(float("nan"))
        split.finish()
        split.session.load_state_dict([before])
        train(1.0)
        split.close()

    run_worlds(1, rank)
