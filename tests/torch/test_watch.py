"""Only a gradient after a forward pass is a backward pass, and nothing keeps alive who wants to know."""

import gc
import weakref

import torch
from torch import nn

from penstock.torch.watch import BackwardPasses


class Listener:
    """Counts what it is told."""

    def __init__(self, model):
        self.count = 0
        self.passes = BackwardPasses(list(model.parameters()), self.told)

    def told(self):
        self.count += 1


def test_a_backward_pass_counts_once_however_many_gradients_it_brings():
    model = nn.Linear(3, 2)
    listener = Listener(model)
    for _ in range(4):
        listener.passes.expected = True
        model(torch.ones(1, 3)).sum().backward()
    assert listener.count == 4


def test_forward_passes_alone_do_not_count_nor_do_gradients_that_nobody_expects():
    model = nn.Linear(3, 2)
    listener = Listener(model)
    model(torch.ones(1, 3)).sum().backward()  # as in no_sync
    for _ in range(4):
        listener.passes.expected = True
        model(torch.ones(1, 3))
    assert listener.count == 0


def test_gradients_of_inputs_alone_do_not_count():
    model, x = nn.Linear(3, 2), torch.ones(1, 3, requires_grad=True)
    listener = Listener(model)
    listener.passes.expected = True
    torch.autograd.grad(model(x).sum(), x)
    assert listener.count == 0


def test_parameters_keep_nobody_alive_and_lose_their_hooks():
    model = nn.Linear(3, 2)
    listener = Listener(model)
    gone = weakref.ref(listener)
    del listener
    gc.collect()
    assert gone() is None
    assert not model.weight._post_accumulate_grad_hooks
