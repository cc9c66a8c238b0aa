"""Training with several workers in one process, on a problem small enough to check by hand."""

import pytest
import torch
from torch import nn

from penstock.bench.convergence.method import Method
from penstock.bench.convergence.study import Study, run_study
from penstock.bench.convergence.summary import against_dense
from penstock.bench.convergence.tasks import Task
from penstock.bench.convergence.training import MOMENTUM, Run
from penstock.zoo.resnet import resnet20


def line_task(together=True):
    """Return the task of fitting a line to 32 points on it."""
    inputs = torch.linspace(-1, 1, 32)[:, None]
    targets = 3 * inputs + 1

    return Task(
        "line", "error", "lower", lambda: nn.Linear(1, 1), 32,
        lambda chosen, noise: (inputs[chosen], targets[chosen]), nn.functional.mse_loss,
        lambda model: float((model(inputs) - targets).square().mean()),
        together=together, global_batch=8, epochs=30, learning_rate=0.1, weight_decay=0.0, clip=0.0,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["dense", "gtopk", "topk", "onebit"])
def test_every_method_fits_the_line(kind):
    rows = []
    study = Study((Method(kind, 0.5 if "topk" in kind else 0.0),), (2,), (1,), epochs=30, judged=3)
    run_study(line_task(), study, "cpu", 1, rows.append)
    assert rows[0]["final"] < 1e-2
    assert len(rows[0]["losses"]) == 30
    assert len(rows[0]["metrics"]) == 3


@pytest.mark.parametrize("together", [True, False])
def test_dense_with_two_workers_is_plain_momentum_sgd_on_both_batches(together):
    task = line_task(together)
    run = Run(task, Method("dense"), 2, seed=4, device="cpu", epochs=2)
    torch.manual_seed(4)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=MOMENTUM)
    for step in range(8):
        optimizer.param_groups[0]["lr"] = float(run.rates[step])
        optimizer.zero_grad()
        batches = [task.batch(run.chosen[step, worker], None) for worker in range(2)]
        sum(task.criterion(model(inputs), wanted) / 2 for inputs, wanted in batches).backward()
        optimizer.step()
        run.compute()
        run.update()
    for ours, theirs in zip(run.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("better", "worse"), [("higher", 0.05), ("lower", -0.05)])
def test_worse_than_dense_knows_which_way_is_better(better, worse):
    same = {"task": "t", "workers": 4, "metric_name": "m", "epochs": 1, "better": better}
    rows = [same | {"method": name, "final": final} for name, final in (("dense", 0.8), ("gtopk", 0.76))]
    found = against_dense(rows)
    assert [line["worse_than_dense"] for line in found] == pytest.approx([0, worse])
    assert "worse_than_dense" not in against_dense(rows[1:])[0]


def test_passes_run_together_give_every_worker_its_own_gradient():
    images = torch.randn((8, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    labels = torch.arange(8)
    runs = []
    for together in (True, False):
        task = Task(
            "few", "loss", "lower", resnet20().build, 8, lambda chosen, noise: (images[chosen], labels[chosen]),
            nn.functional.cross_entropy, lambda model: 0.0, together=together,
            global_batch=8, epochs=1, learning_rate=0.1, weight_decay=0.0, clip=0.0,
        )  # fmt: skip
        runs.append(Run(task, Method("dense"), 2, seed=1, device="cpu", epochs=1))
        runs[-1].compute()
    torch.testing.assert_close(runs[0].gradients, runs[1].gradients, rtol=1e-3, atol=1e-5)
    assert not torch.equal(runs[0].gradients[0], runs[0].gradients[1])
