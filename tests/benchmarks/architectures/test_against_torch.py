"""The zoo's modules, flop counter and autograd of torch as oracle, on the meta device where nothing is computed."""

from functools import cache

import pytest

from architectures import ARCHITECTURES

torch = pytest.importorskip("torch", reason="torch is the oracle of these tests")
CUDNN_PICKS_THE_ORDER = {"lstm_ptb"}  # within an LSTM layer torch's order differs between CPU, meta and CUDA


@cache
def step(name):
    """Return the model's parameter shapes, the order of its gradients, and the flops of both passes of one sample."""
    from torch.utils.flop_counter import FlopCounterMode

    from penstock.zoo import ZOO

    task, meta = ZOO[name](), torch.device("meta")
    ready = []
    with meta:
        model, (inputs, targets) = task.build(), task.make_batch(1, meta)
        for parameter_name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, n=parameter_name: ready.append(n))
        with FlopCounterMode(display=False) as forward:
            loss = task.compare(model(inputs), targets)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    shapes = {parameter_name: tuple(parameter.shape) for parameter_name, parameter in model.named_parameters()}
    return shapes, ready, forward.get_total_flops(), backward.get_total_flops()


def our_layers(name):
    return ARCHITECTURES[name].layers()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_have_the_names_and_shapes_of_the_torch_module(name):
    ours = {parameter.name: parameter.shape for layer in our_layers(name) for parameter in layer.parameters}
    assert ours == step(name)[0]


@pytest.mark.parametrize("name", sorted(ARCHITECTURES.keys() - CUDNN_PICKS_THE_ORDER))
def test_gradients_become_ready_in_the_order_of_autograd(name):
    ours = [parameter.name for layer in reversed(our_layers(name)) for parameter in layer.parameters]
    assert ours == step(name)[1]


def test_gradients_of_the_lstm_become_ready_layer_by_layer_from_the_top():
    ours = [
        {parameter.name for parameter in layer.parameters}
        for layer in reversed(our_layers("lstm_ptb"))
        if layer.parameters
    ]
    theirs = iter(step("lstm_ptb")[1])
    assert [{next(theirs) for _ in group} for group in ours] == ours


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_multiply_accumulates_are_half_of_torchs_forward_flops(name):
    assert 2 * sum(layer.macs for layer in our_layers(name)) == step(name)[2]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_backward_multiply_accumulates_are_half_of_torchs_backward_flops(name):
    ours = sum(work.macs for layer in our_layers(name) for work in layer.backward)
    assert 2 * ours == step(name)[3]
