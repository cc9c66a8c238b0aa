"""Which layers must be here before which module, by who was called so far."""

import torch
from torch import nn

from penstock.torch.layered import Calls
from penstock.torch.layers import layers_of


class Outer(nn.Module):
    """Two layers in a block, and a list that is never called."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.listed = nn.ParameterList([torch.ones(2)])


def calls_of(module):
    layers = layers_of(module)
    return Calls(module, {parameter: layer for layer in layers for parameter in layer.parameters})


def needs(calls, *modules):
    return [[layer.name for layer in calls.before(module)] for module in modules]


def everyone(outer):
    return outer, outer.block, outer.block[0], outer.block[1]


def test_before_the_first_step_each_module_needs_what_it_owns():
    outer = Outer()
    assert needs(calls_of(outer), *everyone(outer)) == [[], [], ["block.0"], ["block.1"]]


def test_whoever_is_called_above_stands_in_for_what_is_not():
    outer = Outer()
    calls = calls_of(outer)
    needs(calls, outer, outer.block, outer.block[0])  # reads the second layer's weights by itself
    calls.step()
    assert needs(calls, *everyone(outer)) == [["listed"], ["block.1"], ["block.0"], ["block.1"]]
    assert calls.unannounced == ()


def test_whoever_was_left_out_once_is_not_relied_on_again():
    outer = Outer()
    calls = calls_of(outer)
    for called in (everyone(outer), everyone(outer)[:3], everyone(outer)):
        needs(calls, *called)
        calls.step()
    assert needs(calls, *everyone(outer)) == [["listed"], ["block.1"], ["block.0"], ["block.1"]]


def test_what_nobody_calls_is_announced_by_nobody():
    outer = Outer()
    calls = calls_of(outer)
    needs(calls, outer.block[0])
    calls.step()
    assert [layer.name for layer in calls.unannounced] == ["block.1", "listed"]


def test_a_shared_part_is_needed_by_everyone_above_it():
    shared = nn.Linear(2, 2)
    outer = nn.ModuleDict({"first": nn.Sequential(shared), "second": nn.Sequential(shared)})
    calls = calls_of(outer)
    needs(calls, outer["first"], outer["second"])
    calls.step()
    assert needs(calls, outer["first"], outer["second"]) == [["first.0"], ["first.0"]]
