"""Layers of many runs at once, against torch's own, run by run and worker by worker."""

import pytest
import torch
from torch.nn import functional

from penstock.bench.convergence.layers import Convolution, NormalisedReLU
from penstock.bench.convergence.layout import Layout
from penstock.bench.convergence.networks import lstm
from penstock.bench.convergence.treebank import SmallLSTM
from penstock.zoo.resnet import resnet20


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shared(values, workers=2):
    """Return parameters as layers take them: the same at every worker, with a gradient for each."""
    return values[:, None].expand(len(values), workers, *values.shape[1:]).detach().requires_grad_()


@pytest.mark.parametrize(("size", "inputs", "outputs", "stride"), [(8, 3, 16, 2), (4, 32, 16, 1)])
def test_a_convolution_gives_every_worker_its_own_weight_gradient(size, inputs, outputs, stride):
    x = functional.pad(random(2, 2, 2, size, size, inputs), (0, -inputs % 16)).requires_grad_()
    weights = random(2, 9, inputs, outputs, seed=1)
    leaf = shared(weights)
    y = Convolution.apply(x, leaf, stride)
    dy = random(*y.shape, seed=2)
    dx, dweights = torch.autograd.grad(y, (x, leaf), dy)
    for run, worker in [(0, 0), (0, 1), (1, 1)]:
        images = x[run, worker].detach().permute(0, 3, 1, 2).requires_grad_()
        kernel = weights[run].unflatten(0, (3, 3)).permute(3, 2, 0, 1).clone().requires_grad_()
        wanted = functional.conv2d(images[:, :inputs], kernel, stride=stride, padding=1)
        gradients = torch.autograd.grad(wanted, (images, kernel), dy[run, worker].permute(0, 3, 1, 2))
        torch.testing.assert_close(y[run, worker], wanted.permute(0, 2, 3, 1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(dx[run, worker], gradients[0].permute(0, 2, 3, 1), rtol=1e-4, atol=1e-4)
        turned = gradients[1].permute(2, 3, 1, 0).flatten(0, 1)
        torch.testing.assert_close(dweights[run, worker], turned, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("adds", [True, False])
def test_normalisation_uses_each_workers_own_statistics(adds):
    x, added = (random(2, 2, 3, 4, 4, 16, seed=seed).requires_grad_() for seed in (0, 1))
    scale, shift = shared(random(2, 16, seed=2)), shared(random(2, 16, seed=3))
    y, mean, variance = NormalisedReLU.apply(x, scale, shift, added if adds else None)
    leaves = (x, scale, shift, *((added,) if adds else ()))
    dy = random(*y.shape, seed=4)
    found = torch.autograd.grad(y, leaves, dy)
    for run, worker in [(0, 0), (1, 1)]:
        own = [leaf[run, worker].detach().clone().requires_grad_() for leaf in leaves]
        flat = own[0].flatten(0, 2)
        wanted = functional.batch_norm(flat, None, None, own[1], own[2], training=True)
        wanted = torch.relu(wanted + own[3].flatten(0, 2) if adds else wanted)
        torch.testing.assert_close(y[run, worker].flatten(0, 2), wanted, rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(found, torch.autograd.grad(wanted, own, dy[run, worker].flatten(0, 2)), strict=True):
            torch.testing.assert_close(ours[run, worker], theirs, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(mean[2 * run + worker], flat.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(variance[2 * run + worker], flat.var(0), rtol=1e-4, atol=1e-5)


def test_an_lstm_is_torchs_own_run_by_run():
    torch.manual_seed(3)
    models = [SmallLSTM(11, width=8) for _ in range(2)]
    layout = Layout.of(models[0])
    leaf = shared(torch.stack([layout.pack(model) for model in models]))
    tokens = torch.randint(0, 11, (2, 2, 3, 5))
    logits = lstm(tokens, layout.views(leaf), dropout=0.0, dtype=torch.float32)
    (found,) = torch.autograd.grad(logits.square().sum(), leaf)
    for run, worker in [(0, 0), (0, 1), (1, 0)]:
        model = models[run]
        wanted = model(tokens[run, worker])
        torch.testing.assert_close(logits[run, worker].view(wanted.shape), wanted, rtol=1e-4, atol=1e-5)
        gradients = torch.autograd.grad(wanted.square().sum(), [model.get_parameter(name) for name in layout.shapes])
        torch.testing.assert_close(
            found[run, worker], torch.cat([gradient.flatten() for gradient in gradients]), rtol=1e-3, atol=1e-4
        )


def test_a_layout_gives_a_model_back_what_it_took():
    torch.manual_seed(1)
    model, other = resnet20().build(), resnet20().build()
    layout = Layout.of(model)
    layout.unpack(layout.pack(model), other)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert layout.views(layout.pack(model))["conv1.weight"].shape == (9, 3, 16)
