"""Layers as flat buffers: which submodules travel together, and gradients without a copy."""

import pytest
import torch
from torch import nn

from penstock.errors import PlanError
from penstock.torch.layers import layers_of, one_layer, staging_for


def names(module, least_nbytes=0):
    """What the layers are called."""
    return [layer.name for layer in layers_of(module, least_nbytes)]


def chain():
    """Layers of 80, 16 and 80 bytes."""
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(2), nn.Linear(4, 4))


def test_every_submodule_with_parameters_is_a_layer():
    assert names(chain()) == ["0", "1", "2"]


@pytest.mark.parametrize(("least_nbytes", "wanted"), [(1, ["0", "1", "2"]), (80, ["0", "1 .. 2"]), (1000, ["0 .. 2"])])
def test_small_neighbours_travel_together(least_nbytes, wanted):
    assert names(chain(), least_nbytes) == wanted


def test_what_is_left_at_the_end_goes_with_the_group_before():
    assert names(chain(), 81) == ["0 .. 2"]  # 96 bytes, then 80
    assert names(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(2).double()), 80) == ["0", "1"]


def test_a_shared_layer_belongs_to_the_first_that_has_it():
    first = nn.Linear(2, 2)
    assert names(nn.Sequential(first, nn.Linear(2, 2), first)) == ["0", "1"]


def test_layers_of_different_types_stay_apart():
    assert names(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), 1000) == ["0", "1"]


def test_gradients_are_the_buffer_itself():
    layer = one_layer(nn.Linear(2, 1))
    layer.flat[:] = torch.tensor([1.0, 2.0, 3.0, 1.0, 1.0])
    layer.lend_gradients()
    weight, bias = layer.parameters
    assert weight.grad.tolist() == [[1.0, 2.0]]
    assert bias.grad.data_ptr() == layer.flat[2:].data_ptr()


def test_a_parameter_without_a_gradient_on_any_rank_gets_none():
    first, second = one_layer(nn.Linear(2, 1)), one_layer(nn.Linear(2, 1))
    first.parameters[0].grad = torch.ones(1, 2)
    for layer in (first, second):
        layer.pack_gradients(2)
    first.flat.add_(second.flat)
    first.lend_gradients()
    assert first.parameters[0].grad.tolist() == [[0.5, 0.5]]
    assert first.parameters[1].grad is None


def test_a_module_on_several_devices_or_on_one_that_cannot_send_is_refused():
    elsewhere = nn.Linear(2, 1, device="meta")
    with pytest.raises(PlanError, match="parameters are on cpu, meta; wanted all in host memory or on one CUDA device"):
        staging_for(nn.Sequential(nn.Linear(2, 2), elsewhere))
    with pytest.raises(PlanError, match="parameters are on meta; wanted all in host memory or on one CUDA device"):
        staging_for(elsewhere)
    assert not staging_for(nn.Linear(2, 2)).is_late


def test_a_layer_of_several_types_is_refused():
    with pytest.raises(PlanError, match=r"layer 'all' has parameters of torch.float32, torch.float64; wanted one type"):
        one_layer(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, dtype=torch.float64)))


def test_a_module_without_parameters_is_refused():
    with pytest.raises(PlanError, match="the module has no parameters that require gradients; wanted at least one"):
        one_layer(nn.ReLU())
