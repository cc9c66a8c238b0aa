"""What each process of a test on random modules and on the zoo does: train by every method, and report the weights.

A graph is a list of layers, each a kind and which earlier layers it takes its input from: chains, skips, joins, shared
weights and layers that nobody uses all come up.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from penstock.planners import PLANNERS
from penstock.torch import DistributedDataParallel as OurDDP
from penstock.torch.overlap import BulkSynchronous
from torch_training import quick
from torch_zoo import BATCH, small_task

WIDTH = 6
ITERATIONS = 20
ZOO_RATE = 1e-3  # small: normalisation over few samples multiplies differences in rounding, step after step
Graph = list[tuple[str, list[int]]]
KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "wide": lambda: nn.Sequential(nn.Linear(WIDTH, 40), nn.ReLU(), nn.Linear(40, WIDTH)),
    "tanh": nn.Tanh,
}


class Random(nn.Module):
    """A module made from a graph; `shared` layers use the weights of the first linear one."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(self.first if kind == "shared" else KINDS[kind]() for kind, _ in graph)
        self.inputs = [sources for _, sources in graph]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [self.first(x)]
        for layer, sources in zip(self.layers, self.inputs, strict=True):
            made.append(layer(sum(made[source % len(made)] for source in sources)) / len(sources))
        return sum(made)


def train_graphs(rank: int, graphs: list[Graph], algorithms: list[str]) -> list[dict[str, list[Any]]]:
    """Train each graph by torch's wrapper ("torch"), by every planner, and by bulk-synchronous algorithms."""

    def batch(step: int) -> torch.Tensor:
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return model(batch(step)).square().mean()

    return [_by_every_method(lambda graph=graph: Random(graph), loss, algorithms) for graph in graphs]


def train_zoo(rank: int, name: str, algorithms: list[str], iterations: int) -> dict[str, list[Any]]:
    """Train a model of the zoo, made smaller, by every method."""
    task, batch = small_task(name), BATCH.get(name, 2)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        torch.manual_seed(1000 * step + rank)
        inputs, targets = task.make_batch(batch, torch.device("cpu"))
        return task.compare(model(inputs), targets)

    return _by_every_method(task.build, loss, algorithms, iterations, ZOO_RATE)


def _by_every_method(
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module, int], torch.Tensor],
    algorithms: list[str],
    iterations: int = ITERATIONS,
    rate: float = 0.01,
) -> dict[str, list[Any]]:
    found = {"torch": _train(build, loss, iterations, TorchDDP, rate)}
    for number, planner in enumerate(PLANNERS):
        options = {**quick(), "planner": planner, "strategy": "ring" if number % 2 else "native"}
        found[planner] = _train(build, loss, iterations, lambda module, given=options: OurDDP(module, **given), rate)
    for algorithm in algorithms:
        found[algorithm] = _train_bulk_synchronous(build, loss, iterations, algorithm, rate)
    return found


def _train(
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module, int], torch.Tensor],
    iterations: int,
    wrap: Callable[[nn.Module], nn.Module],
    rate: float,
) -> list[Any]:
    torch.manual_seed(1)
    module = build()
    wrapper = wrap(module)
    optimizer = _optimizer(wrapper.parameters(), rate)
    for step in range(iterations):
        loss(wrapper, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach().clone().numpy() for each in module.parameters()]


def _train_bulk_synchronous(
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module, int], torch.Tensor],
    iterations: int,
    algorithm: str,
    rate: float,
) -> list[Any]:
    torch.manual_seed(1)
    module = build()
    bsp = BulkSynchronous(module, lambda parameters: _optimizer(parameters, rate), algorithm)
    for step in range(iterations):
        loss(bsp, step).backward()
        bsp.step()
    bsp.close()
    return [each.detach().clone().numpy() for each in module.parameters()]


def _optimizer(parameters: Any, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=rate, momentum=0.5)
