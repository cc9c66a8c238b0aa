"""Training with several workers in one process, on a problem small enough to check by hand."""

import pytest
import torch
from torch import nn

from penstock.bench.convergence.method import Method
from penstock.bench.convergence.study import Study, against_dense, run_study
from penstock.bench.convergence.tasks import Task
from penstock.bench.convergence.training import MOMENTUM, Run


def line_task():
    """Return the task of fitting a line to 32 points on it."""
    inputs = torch.linspace(-1, 1, 32)[:, None]
    targets = 3 * inputs + 1

    def loss(model, chosen, noise):
        return (model(inputs[chosen]) - targets[chosen]).square().mean()

    return Task(
        "line", "error", "lower", lambda: nn.Linear(1, 1), 32, loss,
        lambda model: float((model(inputs) - targets).square().mean()),
        global_batch=8, epochs=30, learning_rate=0.1, weight_decay=0.0, clip=0.0,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["dense", "gtopk", "topk", "onebit"])
def test_every_method_fits_the_line(kind):
    rows = []
    study = Study((Method(kind, 0.5 if "topk" in kind else 1.0),), (2,), (1,), epochs=30, judged=3)
    run_study(line_task(), study, "cpu", 1, rows.append)
    assert rows[0]["final"] < 1e-2
    assert len(rows[0]["losses"]) == 30
    assert len(rows[0]["metrics"]) == 3


def test_dense_with_two_workers_is_plain_momentum_sgd_on_both_batches():
    task = line_task()
    run = Run(task, Method("dense"), 2, seed=4, device="cpu", epochs=2)
    torch.manual_seed(4)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=MOMENTUM)
    for step in range(8):
        optimizer.param_groups[0]["lr"] = float(run.rates[step])
        optimizer.zero_grad()
        sum(task.loss(model, run.chosen[step, worker], None) / 2 for worker in range(2)).backward()
        optimizer.step()
        run.step()
    for ours, theirs in zip(run.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_worse_than_dense_knows_which_way_is_better():
    rows = [{"workers": 4, "method": name, "final": final} for name, final in (("dense", 0.8), ("gtopk", 0.76))]
    assert against_dense(rows, "higher")[1]["worse_than_dense"] == pytest.approx(0.05)
    assert against_dense(rows, "lower")[1]["worse_than_dense"] == pytest.approx(-0.05)
