"""Fleets that replay CUDA graphs side by side, against fleets that take their steps one kernel at a time."""

from dataclasses import replace

import pytest
import torch

from penstock.bench.convergence import networks, study
from penstock.bench.convergence.method import parse_method
from penstock.bench.convergence.training import Fleet
from penstock.bench.convergence.treebank import language_task

METHODS = "dense gtopk:0.05 gtopk-published:0.05 topk:0.05 onebit dgc:0.05"


def losses(monkeypatch, eager_steps):
    """Return every step's losses of 4 and 8 workers trained side by side, an LSTM without dropout."""
    monkeypatch.setattr(study, "_EAGER_STEPS", eager_steps)
    tokens = torch.randint(0, 50, (36 * 40,), generator=torch.Generator().manual_seed(1)).cuda()
    task = language_task(tokens, tokens[:200], 50, torch.float32, width=32)
    methods = [parse_method(text) for text in METHODS.split()]
    recipe = replace(task.recipe, steps=40, warmup=6, rising=10)
    fleets = [Fleet(task, recipe, methods, [1], workers, "cuda") for workers in (4, 8)]
    study.train(fleets, judged=1, seconds=1000, say=lambda text: None)
    return torch.stack([fleet.losses for fleet in fleets])


@pytest.mark.gpu
def test_graphs_side_by_side_take_the_steps_of_eager_fleets(monkeypatch):
    """Graphs captured on one stream shared its workspace for matrix products, and ended as NaN."""
    monkeypatch.setattr(networks.functional, "dropout", lambda x, *_: x)
    graphs, eager = losses(monkeypatch, 3), losses(monkeypatch, 10**9)
    torch.testing.assert_close(graphs, eager, rtol=1e-4, atol=0)
