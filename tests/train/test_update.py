"""What happens between a batch and the next weights, beside torch's own steps."""

import pytest
import torch
from torch import nn

from penstock.errors import TrainError
from penstock.train.job import Job
from penstock.train.update import Update, make_scaler

CPU = torch.device("cpu")


class Task:
    """A linear model with a mean loss: batches of one size add up to a larger one."""

    def loss(self, model, batch):
        return (model(batch) ** 2).mean()


def made(job, lr=0.1, momentum=0.5):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return model, Update(job, torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum), CPU, make_scaler(job, CPU))


class Alone(nn.Module):
    """A wrapper of one rank, as far as an update knows it."""

    def __init__(self, module):
        super().__init__()
        self.module, self.entered = module, 0

    def forward(self, batch):
        return self.module(batch)

    def no_sync(self):
        self.entered += 1
        return torch.enable_grad()


def test_batches_that_are_accumulated_are_one_large_batch_and_exchanged_once():
    model, update = made(Job(accumulate=4))
    wrapper, batches = Alone(model), list(torch.randn(4, 8, 4))
    loss = update.gradients(Task(), wrapper, batches)
    whole, _ = made(Job())
    wanted = Task().loss(whole, torch.cat(batches))
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(model.weight.grad, whole.weight.grad)
    assert wrapper.entered == 3  # all but the last stay local


def test_the_learning_rate_rises_in_equal_parts_to_the_tasks_and_stays():
    model, update = made(Job(lr_warmup=4), lr=0.2)
    rates = []
    for step in range(1, 7):
        update.gradients(Task(), Alone(model), [torch.ones(2, 4)])
        update.apply(step)
        rates.append(update.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.2, 0.2])


@pytest.mark.parametrize("amp", ["", "fp16"])
def test_gradients_are_clipped_by_torch_without_a_codec_and_after_the_scaler(amp):
    model, update = made(Job(clip=1e-4, amp=amp), momentum=0.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    moved = torch.zeros(1)
    for step in range(1, 9):  # the scaler skips steps until its scale suits
        update.gradients(Task(), Alone(model), [torch.full((8, 4), 0.01)])
        update.apply(step)
        moved = torch.cat([(new - old).reshape(-1) for new, old in zip(model.parameters(), before, strict=True)])
        if moved.any():
            break
    assert moved.norm().item() == pytest.approx(0.1 * 1e-4, rel=1e-2)


def test_with_a_codec_momentum_and_clipping_are_the_exchanges():
    job = Job(codec="gtopk", momentum=0.9, clip=0.25)
    _, update = made(job)
    assert update.optimizer.param_groups[0]["momentum"] == 0.0
    assert (job.compression.momentum, job.compression.clip) == (0.9, 0.25)
    dense = Job(momentum=0.9, clip=0.25)
    _, update = made(dense)
    assert update.optimizer.param_groups[0]["momentum"] == 0.9
    assert (dense.compression.momentum, dense.compression.clip) == (0.0, None)


def test_momentum_needs_an_optimizer_that_has_one():
    model = nn.Linear(4, 1)
    with pytest.raises(TrainError, match=r"--momentum 0\.9 with Adam; wanted a task that has SGD, such as digits"):
        Update(Job(momentum=0.9), torch.optim.Adam(model.parameters()), CPU, None)


def test_mixed_precision_computes_in_16_bits_and_keeps_gradients_in_32():
    model, update = made(Job(amp="bf16"))
    seen = []
    model.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    update.gradients(Task(), Alone(model), [torch.ones(2, 4)])
    assert seen == [torch.bfloat16]
    assert model.weight.grad.dtype is torch.float32
